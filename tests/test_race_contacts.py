"""Contacts on whole courses, against MuJoCo's collisions and against brute force."""
import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rlnb.race.contacts import DRONE, FRAME_CENTRES, FRAME_HALVES, POLE_RADIUS, box_gap, clearance, contacts, segment_distance
from rlnb.race.courses import draw_courses
from rlnb.race.levels import load_level
from rlnb.tracker.dynamics import rotation

POSES = 9000


def scene() -> mujoco.MjModel:
    "Four gates, four poles and a drone, with the public course's shapes."
    frame = "".join(
        '<geom type="box" pos="{} {} {}" size="{} {} {}"/>'.format(*c, *h) for c, h in zip(FRAME_CENTRES, FRAME_HALVES))
    gates = "".join(f'<body mocap="true">{frame}<geom type="box" pos="0 0 -0.86" size="0.05 0.05 0.5"/></body>' for _ in range(4))
    poles = '<body mocap="true"><geom type="capsule" pos="0 0 -0.8" size="0.015 0.8"/></body>' * 4
    drone = '<body><freejoint/><inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/><geom type="box" size="0.07 0.07 0.02"/></body>'
    return mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{gates}{poles}{drone}</worldbody></mujoco>")


def test_agreement_with_mujoco_on_random_courses():
    """Random poses near random gates and poles of random courses: which of the 12 objects are touched?

    Left out: less than .1 mm from touching, where rounding decides, and poles whose axis runs through the drone, where MuJoCo's capsule
    test is not reliable."""
    rng = np.random.default_rng(7)
    courses = jax.tree.map(lambda x: np.repeat(x, POSES // 500, axis=0), draw_courses(load_level(3), np.arange(500)))
    gate, kind = rng.integers(4, size=POSES), rng.integers(3, size=POSES)
    worlds, matrix = np.arange(POSES), np.asarray(courses.gate_rotation)
    local = np.where((kind == 0)[:, None], rng.uniform([-0.1, -0.42, -0.42], [0.1, 0.42, 0.42], (POSES, 3)),
                     rng.uniform([-0.13, -0.13, -1.4], [0.13, 0.13, -0.4], (POSES, 3)))
    at_gate = courses.gate_position[worlds, gate] + np.einsum("nij,nj->ni", matrix[worlds, gate], local)
    at_pole = courses.pole[worlds, gate] + rng.uniform([-0.09, -0.09, -1.6], [0.09, 0.09, 0.05], (POSES, 3))
    position = np.asarray(np.where((kind == 2)[:, None], at_pole, at_gate), np.float32)
    xyzw = rng.normal(size=(POSES, 4))
    xyzw = np.asarray(xyzw / np.linalg.norm(xyzw, axis=1, keepdims=True), np.float32)
    room = jax.tree.map(np.asarray, jax.jit(clearance)(courses, position, rotation(jnp.asarray(xyzw))))

    model = scene()
    data = mujoco.MjData(model)
    theirs = {name: np.zeros((POSES, 4), bool) for name in room}
    quats = np.zeros((POSES, 4, 4))
    for n in range(POSES):
        for g in range(4):
            mujoco.mju_mat2Quat(quats[n, g], matrix[n, g].astype(float).ravel())
        data.mocap_pos[:4], data.mocap_quat[:4], data.mocap_pos[4:] = courses.gate_position[n], quats[n], courses.pole[n]
        data.qpos[:] = [*position[n], xyzw[n, 3], *xyzw[n, :3]]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_collision(model, data)
        for contact in data.contact:
            shape = min(contact.geom)  # the drone's is the last one
            if contact.dist <= 0:
                name, index = ("pole", shape - 20) if shape >= 20 else ("stand" if shape % 5 == 4 else "frame", shape // 5)
                theirs[name][n, index] = True
    for name, wanted in theirs.items():
        sure = np.abs(room[name]) > 1e-4
        if name == "pole":
            sure &= room[name] > -POLE_RADIUS
        tried = sure & (np.abs(room[name]) < 0.1)  # close enough to be a question
        assert np.array_equal((room[name] <= 0)[sure], wanted[sure]), name
        assert tried.sum() >= 2000 and 0.2 < wanted[tried].mean() < 0.8, (name, tried.sum(), wanted[tried].mean())


def test_segments_against_points_along_them():
    rng = np.random.default_rng(3)
    start, step = rng.uniform(-0.3, 0.3, (500, 3)), rng.uniform(-0.5, 0.5, (500, 3))
    step[:100, 0] = 0  # parallel to a face
    step[100:150, :2] = 0  # parallel to an edge
    step[150] = 0  # a point
    points = start[:, None] + np.linspace(0, 1, 5001)[:, None] * step[:, None]
    brute = np.linalg.norm(points - np.clip(points, -np.array(DRONE), DRONE), axis=-1).min(axis=1)
    ours = segment_distance(jnp.asarray(start, jnp.float32), jnp.asarray(step, jnp.float32), jnp.array(DRONE))
    assert 0.02 < np.mean(brute == 0) < 0.9
    np.testing.assert_allclose(ours, brute, atol=2e-4)
    assert np.all(np.asarray(ours) <= brute + 1e-6), "no point is nearer than the nearest"


def test_gaps_do_not_depend_on_who_is_first():
    rng = np.random.default_rng(4)
    turn = rotation(jnp.asarray((q := rng.normal(size=(300, 4))) / np.linalg.norm(q, axis=1, keepdims=True), jnp.float32))
    offset, half_a, half_b = (jnp.asarray(rng.uniform(low, 0.5, (300, 3)), jnp.float32) for low in (-0.5, 0.02, 0.02))
    back = box_gap(-jnp.einsum("nij,ni->nj", turn, offset), jnp.swapaxes(turn, 1, 2), half_b, half_a)
    np.testing.assert_allclose(box_gap(offset, turn, half_a, half_b), back, atol=1e-4)


def test_a_pole_ends_in_a_round_cap_above_its_top():
    course = draw_courses(load_level(0), [1])
    top, level = course.pole[0, 0], jnp.eye(3)[None]

    def above(height):
        return bool(contacts(course, (top + jnp.array([0.0, 0, height]))[None], level)["pole"][0, 0])

    assert above(0.02 + 0.0149) and not above(0.02 + 0.0151)
    assert np.isclose(clearance(course, (top + jnp.array([0.2, 0, -1.0]))[None], level)["pole"][0, 0], 0.2 - 0.07 - POLE_RADIUS, atol=1e-6)
