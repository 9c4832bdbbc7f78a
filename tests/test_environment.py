"""The environment on real physics: episodes, ends, and what may not be in it."""
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlnb.tracker import commands, environment, exams, observations, ppo, rewards, training
from rlnb.tracker.commands import FAMILY_NAMES, mixture
from rlnb.tracker.environment import Disturbance, TrackerConfig, TrackerEnv, crashed
from rlnb.tracker.observations import V3

ENVS = 16
EVERYTHING = mixture(**{name: 1.0 for name in FAMILY_NAMES})


@pytest.fixture(scope="module")
def flown():
    "Two hundred steps of random actions in short episodes, half of the drones without thrust."
    env = TrackerEnv(TrackerConfig(num_envs=ENVS, pool_rows=64, episode_steps=40), EVERYTHING)

    def advance(state, key):
        after = env.step(state, jax.random.uniform(key, (ENVS, 4), minval=-1.0).at[:ENVS // 2, 3].set(-1.0))
        small = {k: after.info[k] for k in ("row", "step", "truncation")}
        return after, (after.obs, after.reward, after.done, after.metrics, small)

    first = jax.jit(env.reset)(jax.random.key(1))
    last, steps = jax.jit(lambda s: jax.lax.scan(advance, s, jax.random.split(jax.random.key(2), 200)))(first)
    return env, first, last, jax.device_get(steps)


def test_everything_is_finite_and_bounded(flown):
    _, _, _, (obs, reward, _, metrics, _) = flown
    assert obs.shape == (200, ENVS, V3.size) and np.isfinite(obs).all()
    weights = rewards.ReferenceCommandReward()
    assert np.isfinite(reward).all() and reward.max() < 4 and reward.min() > -(weights.crash + 2 * weights.action_change)
    terms = [name for name in metrics if not name.endswith("_error")]
    np.testing.assert_allclose(sum(metrics[name] for name in terms), reward, atol=1e-4)


def test_a_new_episode_draws_a_new_sequence_and_ends_have_a_reason(flown):
    _, _, _, (_, _, done, _, info) = flown
    assert done.sum() > 3 * ENVS
    assert 0 < info["truncation"].sum() < done.sum()  # both kinds of ends happened
    row = info["row"]
    changed = np.diff(row, axis=0) != 0
    assert done[1:][changed].all()  # never in mid-episode
    assert changed.sum() > 0.9 * done[1:].sum()  # 64 rows: seldom the same one again
    going_on = ~done[1:]
    assert (np.diff(info["step"], axis=0)[going_on] == 1).all()


def test_the_same_key_flies_the_same_and_another_one_does_not():
    env = TrackerEnv(TrackerConfig(num_envs=ENVS, pool_rows=64), EVERYTHING)
    reset = jax.jit(env.reset)
    one, same, other = (reset(jax.random.key(k)).obs for k in (0, 0, 1))
    assert (one == same).all() and not (one == other).all()


@pytest.mark.parametrize("position, quaternion, airborne, fate", [
    ((0, 0, 1.0), (0, 0, 0, 1), True, False), ((0, 0, 0.0), (0, 0, 0, 1), True, True), ((0, 0, 0.0), (0, 0, 0, 1), False, False),
    ((3.1, 0, 1.0), (0, 0, 0, 1), True, True), ((0, -3.1, 1.0), (0, 0, 0, 1), True, True), ((0, 0, 2.6), (0, 0, 0, 1), True, True),
    ((0, 0, 1.0), (np.sin(np.deg2rad(39)), 0, 0, np.cos(np.deg2rad(39))), True, False),  # 78 degrees
    ((0, 0, 1.0), (np.sin(np.deg2rad(41)), 0, 0, np.cos(np.deg2rad(41))), True, True),  # 82 degrees
    ((np.nan, 0, 1.0), (0, 0, 0, 1), True, True)])
def test_what_a_crash_is(position, quaternion, airborne, fate):
    body = environment.Body(jnp.array([position], jnp.float32), jnp.array([quaternion], jnp.float32), jnp.zeros((1, 3)), jnp.zeros((1, 3)))
    assert bool(crashed(body, jnp.array([airborne]))[0]) is fate


def test_the_tracker_knows_nothing_of_races():
    "Neither names nor code of command, observation, reward, environment and learner speak of gates, obstacles, or race progress."
    for module in (commands, observations, rewards, environment, ppo, training):
        code = "\n".join(line.split("#")[0] for line in inspect.getsource(module).splitlines() if not line.strip().startswith(('"', "#")))
        for word in ("gate", "obstacle", "aperture", "finish_line", "lap_", "race_"):
            found = [line for line in code.splitlines() if word in line.lower() and "aggregate" not in line.lower()]
            assert not found, (module.__name__, word, found[:3])


def test_disturbances_disturb():
    "Each one alone changes the flight of a policy that does nothing, and mass by no more than it says."
    def flight(disturbance):
        env = TrackerEnv(TrackerConfig(num_envs=8, pool_rows=4, auto_reset=False), mixture(hover=1.0), disturbance)
        state = jax.jit(env.reset)(jax.random.key(0))
        path = jax.jit(lambda s: jax.lax.scan(lambda s, _: ((s := env.step(s, jnp.full((8, 4), 0.05))), s.obs), s, length=40))(state)[1]
        return np.asarray(path), np.asarray(state.pipeline_state.params.mass).ravel()

    nominal, mass = flight(Disturbance())
    assert np.ptp(mass) == 0
    heavy, masses = flight(Disturbance(mass=0.12))
    assert 0.02 < np.abs(masses / mass - 1).max() <= 0.12 + 1e-6
    for changed in (heavy, *(flight(Disturbance(**{name: size}))[0] for name, size in
                             (("force", 0.1), ("action_noise", 0.05), ("observation_noise", 0.01), ("latency", 1)))):
        assert np.abs(changed - nominal).max() > 1e-3
    with pytest.raises(ValueError, match="latency is 3"):
        Disturbance(latency=3)


def test_a_start_from_the_ground_is_no_crash():
    examiner = exams.Examiner(episodes=4)
    flights = examiner.fly(examiner.learner.init_policy(jax.random.key(0)), "hover", range(4), ground=True)
    assert flights.position[:, 0, 2].max() < 0.05 and flights.finite
    with pytest.raises(ValueError, match="3 seeds for an examiner of 4 episodes"):
        examiner.fly(examiner.learner.init_policy(jax.random.key(0)), "hover", range(3))
    with pytest.raises(ValueError, match="unknown exam 'hoover'"):
        exams.find_exam("hoover")
