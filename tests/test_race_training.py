"Recorded references and the training that follows them."
import rlnb.tracker  # noqa: F401  first: it sets the flag that crazyflow wants

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnb.cli.main import main
from rlnb.race.references import BRAKING, WIDEST, Recording, ReferenceEnv, as_sequences, practice_style, run_out, varied, wandering_headings
from rlnb.race.training import RaceRecipe, held_still
from rlnb.tracker.commands import DT, SEQUENCE_STEPS, mixture
from rlnb.tracker.environment import TrackerConfig
from rlnb.tracker.ppo import Learner

speeds = st.floats(-3, 3, allow_nan=False)


def bank(rows: int = 6):
    "References that move along x at different speeds."
    velocity = np.zeros((rows, SEQUENCE_STEPS, 3), np.float32)
    velocity[..., 0] = np.linspace(0.1, 0.5, rows)[:, None]
    position = np.cumsum(velocity, axis=1) * DT + np.float32([0, 0, 1])
    return as_sequences(position.astype(np.float32), velocity, np.full(rows, 300))


@given(speeds, speeds, speeds)
@settings(deadline=None)
def test_a_reference_runs_out_level_and_ends_at_rest(x, y, z):
    start, motion = np.array([0.5, -0.5, 1.0]), np.array([x, y, z])
    position, velocity = run_out(start, motion, 200)
    speed = np.hypot(x, y)
    assert np.allclose(velocity[-1], 0) and np.allclose(position[:, 2], 1.0) and np.allclose(velocity[:, 2], 0)
    assert np.isclose(np.linalg.norm(position[-1] - start), speed**2 / (2 * BRAKING), atol=1e-6), "the braking distance"
    moved = np.linalg.norm(np.diff(np.vstack([start, position]), axis=0), axis=1)
    assert moved.max() <= DT * speed + 1e-9 and (np.diff(moved) <= 1e-9).all()


def test_variants_keep_speed_height_and_shape():
    known = bank()
    many = jax.device_get(varied(jax.random.key(1), jax.tree.map(jnp.asarray, known), 200))
    assert np.allclose(np.linalg.norm(many.velocity, axis=-1), many.speed, atol=1e-5) and np.allclose(many.position[..., 2], 1.0)
    assert np.allclose(many.position[:, 0], many.start)
    assert np.allclose(np.diff(many.position, axis=1) / DT, many.velocity[:, 1:], atol=1e-3)
    angle = np.arctan2(many.velocity[:, 0, 1], many.velocity[:, 0, 0])
    assert np.histogram(angle, 4, (-np.pi, np.pi))[0].min() > 25, "they point everywhere"


def test_headings_stay_within_what_can_be_commanded():
    heading = np.asarray(wandering_headings(jax.random.key(2), 300))
    still = (heading == 0).all(axis=1)
    assert np.abs(heading).max() < np.pi / 2 and np.abs(heading).max() > WIDEST / 2 and 30 < still.sum() < 100
    assert np.abs(np.diff(heading, axis=1)).max() <= 2.0 * DT + 1e-6


def test_renewing_touches_the_unused_half_only():
    env = ReferenceEnv(TrackerConfig(num_envs=4, pool_rows=20))
    source = {"bank": jax.tree.map(jnp.asarray, bank()), "weights": mixture(hover=1.0)}
    state = env.reset(jax.random.key(0), source)
    after = env.renew(state, jax.random.key(1), source)
    old, new = np.asarray(state.info["pool"].position), np.asarray(after.info["pool"].position)
    assert np.array_equal(old[:20], new[:20]) and not np.array_equal(old[20:], new[20:]) and int(after.info["half"]) == 1
    assert int((np.asarray(after.info["pool"].family) == -1).sum()) == 2 * int(env.share * 20)


def test_statistics_that_are_held_still_do_not_move():
    recipe = RaceRecipe()
    learner = Learner(ReferenceEnv(TrackerConfig(num_envs=1, pool_rows=2)), recipe.ppo)
    policy = held_still(learner.init_policy(jax.random.key(0)).replace(mean=jnp.full(59, 0.3)), 0.2)
    assert np.allclose(np.exp(policy.log_std), 0.2)
    from rlnb.tracker.ppo import merge_statistics

    after = merge_statistics(policy, jnp.full((32768, 56 + 3), 50.0), recipe.ppo.memory)
    assert np.abs(np.asarray(after.mean) - 0.3).max() < 0.01
    ladder = merge_statistics(policy.replace(count=jnp.float32(1e6)), jnp.full((32768, 56 + 3), 50.0), 1e6)
    assert np.abs(np.asarray(ladder.mean) - 0.3).min() > 1, "the ladder's would have moved"


def test_practice_is_at_least_as_wild_as_any_race():
    from rlnb.race.styles import STYLES

    styles = [practice_style(np.random.default_rng(seed), Recording()) for seed in range(40)]
    assert max(s.speed for s in styles) > max(s.speed for s in STYLES.values())
    assert max(s.lateral for s in styles) > max(s.lateral for s in STYLES.values())
    assert min(s.launch for s in styles) >= max(s.launch for s in STYLES.values())


@pytest.mark.parametrize("words, said", [
    (["--effort", "0"], "above 0"), (["--effort", "2"], "at most 1"), (["--checkpoint", "nowhere"], "no such folder")])
def test_what_race_train_refuses(words, said, capsys):
    assert main(["race-train", *words]) == 1
    assert said in capsys.readouterr().err
