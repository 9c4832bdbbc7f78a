"""Courses: every seed for itself, and the rules of the random layout on a grid small enough to look through."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlnb.race.courses import YAW_SPREAD, _away, _corridor, _pick, draw_courses, draw_layout
from rlnb.race.levels import load_level

SEEDS = np.arange(40)
LEVEL = load_level(3)
COURSES = draw_courses(LEVEL, SEEDS)


def test_a_course_depends_on_its_own_seed_alone():
    reverse = draw_courses(LEVEL, SEEDS[::-1])
    some = draw_courses(LEVEL, [3, 17])
    for together, turned, apart in zip(*map(jax.tree.leaves, (COURSES, reverse, some))):
        np.testing.assert_array_equal(together, turned[::-1])
        np.testing.assert_allclose(np.asarray(together)[[3, 17]], apart, atol=1e-6)


def test_different_seeds_are_different_courses():
    assert len(np.unique(np.asarray(COURSES.gate_position[:, 0, 0]))) == len(SEEDS)


def test_what_is_drawn_stays_within_the_levels_ranges():
    course = jax.tree.map(np.asarray, COURSES)
    spread = LEVEL.spread
    for values, by in ((course.start_position, spread.start_position), (course.start_rpy, spread.start_rpy),
                       (course.gate_position - course.nominal_gate_position, spread.gate_position),
                       (course.pole - course.nominal_pole, spread.pole_top)):
        assert np.all(values >= np.array(by.low) - 1e-6) and np.all(values <= np.array(by.high) + 1e-6)
        assert np.all(np.ptp(values.reshape(-1, 3), axis=0) > 0.5 * (np.array(by.high) - by.low))
    assert 0.0384 <= course.mass.min() < course.mass.max() <= 0.0485
    nominal = draw_courses(load_level(0), [0]).inertia[0]
    assert np.all(np.abs(course.inertia - nominal) <= 1.001e-6) and np.all(np.ptp(course.inertia, axis=0) > 1e-6)
    turns = course.gate_rotation @ np.swapaxes(course.gate_rotation, -1, -2)
    np.testing.assert_allclose(turns, np.broadcast_to(np.eye(3), turns.shape), atol=1e-5)


def test_nominal_poses_of_the_file_tell_of_heights_only():
    blind = draw_courses(LEVEL, SEEDS, nominal="file")
    np.testing.assert_array_equal(blind.gate_position, COURSES.gate_position)
    np.testing.assert_allclose(blind.nominal_gate_position[5], LEVEL.gate_position)
    np.testing.assert_allclose(blind.nominal_pole[5], LEVEL.pole_top)
    np.testing.assert_allclose(blind.nominal_gate_rotation[5, 2], np.eye(3))


def broken_rules(key):
    "For each gate and pole (4,) of one layout: is it away from every allowed grid point although there is one, and is there none?"
    gates, yaws, poles = draw_layout(key, LEVEL.arena)
    start = jax.random.uniform(jax.random.split(key, 13)[0], (2,), minval=jnp.array([-2.5, -1.5]), maxval=jnp.array([2.5, 1.5]))
    x, y = jnp.meshgrid(jnp.linspace(-2, 2, 40), jnp.linspace(-1, 1, 40))
    grid = jnp.stack([x.ravel(), y.ravel()], axis=-1)
    free_gate = free_pole = _away(grid, start)
    before, wrong, empty, turned = start, [], [], []
    for gate, yaw, pole in zip(gates, yaws, poles):
        corridor = _corridor(grid, before, gate)
        for place, allowed in ((gate, free_gate), (pole, free_pole & corridor)):
            at_home = jnp.all(jnp.abs(grid - place) <= jnp.array([0.0501, 0.0251]), axis=-1)
            wrong.append(~jnp.any(at_home & allowed) & jnp.any(allowed) | ~jnp.any(at_home))
            empty.append(~jnp.any(allowed))
        turned.append((yaw - jnp.arctan2(*(gate - before)[::-1]) + jnp.pi) % (2 * jnp.pi) - jnp.pi)
        free_gate = free_gate & _away(grid, gate) & ~corridor
        free_pole = free_pole & _away(grid, gate) & _away(grid, pole)
        before = gate
    return jnp.stack(wrong), jnp.stack(empty), jnp.stack(turned)


def test_rules_of_the_random_layout():
    "Every gate and pole stands in the cell of a grid point that its rule allows, wherever the rule allows one."
    wrong, empty, turned = map(np.asarray, jax.jit(jax.vmap(broken_rules))(jax.random.split(jax.random.key(5), 500)))
    assert wrong.mean() < 0.001, "one in a thousand: rounding at the rim of a mask"
    assert empty[:, 0::2].mean() < 0.02 < empty[:, 1::2].mean() < 0.2, "gates nearly always find a place, poles not always"
    assert np.abs(turned).max() <= YAW_SPREAD + 1e-5 and abs(turned.mean()) < 0.05 and 0.4 < turned.std() < 0.46, "uniform"


def test_picking_from_a_mask():
    grid, cell = jnp.stack([jnp.arange(10.0), jnp.zeros(10)], axis=-1), jnp.array([0.2, 0.2])
    keys = jax.random.split(jax.random.key(1), 2000)
    allowed = jnp.arange(10) % 3 == 1  # 1, 4, 7
    at = np.asarray(jax.vmap(lambda key: _pick(key, allowed, grid, cell))(keys))
    point, count = np.unique(at[:, 0].round(), return_counts=True)
    assert point.tolist() == [1, 4, 7] and count.min() > 0.28 * 2000
    assert 0.099 < np.abs(at[:, 0] - at[:, 0].round()).max() <= 0.1
    none = np.asarray(jax.vmap(lambda key: _pick(key, jnp.zeros(10, bool), grid, cell))(keys))
    assert len(np.unique(none[:, 0].round())) == 10, "nothing allowed: any point"


def test_masks():
    grid = jnp.array([[0.0, 0.0], [0.99, 0.0], [1.01, 0.0], [0.5, 0.39], [0.5, 0.41], [-0.01, 0.0], [2.01, 0.0], [1.99, -0.39]])
    assert _away(grid, jnp.zeros(2)).tolist() == [False, False, True, False, False, False, True, True]
    assert _corridor(grid, jnp.zeros(2), jnp.array([2.0, 0.0])).tolist() == [True, True, True, True, False, False, False, True]


@pytest.mark.parametrize("seeds", [[], [-1], [2**31], [1.5], [[1, 2]], 3])
def test_seeds_that_are_none(seeds):
    with pytest.raises(ValueError, match="whole numbers from 0"):
        draw_courses(LEVEL, seeds)


def test_an_unknown_nominal():
    with pytest.raises(ValueError, match="nominal is 'map': it is one of 'layout', 'file'"):
        draw_courses(LEVEL, [1], nominal="map")
