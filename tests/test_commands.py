"""What must hold for every reference that the generator can draw, whatever the family and the seed."""
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnb.tracker.commands import (
    DT,
    EPISODE_STEPS,
    FAMILIES,
    FAMILY_NAMES,
    LOOKAHEAD,
    WORKSPACE,
    Kind,
    command_at,
    draw_sequences,
    mixture,
    phase_table,
)
from rlnb.tracker.exams import EXAMS
from rlnb.tracker.training import HELD_OUT, practised

TABLE, N = phase_table(), EPISODE_STEPS
families, seeds = st.sampled_from(FAMILY_NAMES), st.integers(0, 2**31 - 1)


def drawn(name: str, seed: int, rows: int = 32):
    return jax.device_get(draw_sequences(jax.random.key(seed), mixture(**{name: 1.0}), TABLE, rows))


@given(families, seeds)
@settings(max_examples=60)
def test_no_reference_jumps_leaves_the_room_or_asks_for_the_impossible(name, seed):
    rows = drawn(name, seed)
    assert np.isfinite(rows.position).all() and np.isfinite(rows.velocity).all()
    assert (rows.position >= WORKSPACE[0] - 1e-3).all() and (rows.position <= WORKSPACE[1] + 1e-3).all()
    if not rows.fixed[0]:  # each step moves by desired speed times dt
        moved = np.linalg.norm(np.diff(rows.position[:, :N + 1], axis=1), axis=-1)
        np.testing.assert_allclose(moved, rows.speed[:, :N] * DT, atol=2e-6)
    acceleration = np.linalg.norm(np.diff(rows.velocity[:, :N], axis=1), axis=-1) / DT
    assert acceleration.max() < 9.0  # m/s2, what a thrust-to-weight of 1.88 leaves in the plane
    assert np.abs(np.diff(rows.heading, axis=1)).max() / DT < 2.5 and np.abs(rows.heading).max() < np.pi / 2
    assert (rows.speed >= 0).all() and rows.speed.max() <= 1.2 + 1e-6


@given(families, seeds)
@settings(max_examples=30)
def test_desired_velocity_points_ahead_and_the_gaps_shrink_before_a_stop(name, seed):
    rows = drawn(name, seed)
    np.testing.assert_allclose(np.linalg.norm(rows.velocity[:, :N], axis=-1), rows.speed[:, :N], atol=1e-4)
    if rows.fixed[0]:
        assert np.ptp(rows.position, axis=1).max() == 0  # one target throughout
        travelled = (rows.velocity[:, :N] * DT).sum(axis=1)  # and the commanded velocities lead from the start to it
        np.testing.assert_allclose(travelled, rows.position[:, 0] - rows.start, atol=0.02)
        distance = np.linalg.norm(rows.position[:, 0] - rows.start, axis=-1)
        assert (distance > 0.3).all() and (distance < 1.35).all()
        return
    ahead = rows.position[:, LOOKAHEAD:N + LOOKAHEAD] - rows.position[:, :N]
    gap = np.linalg.norm(ahead, axis=-1)
    moving = (gap > 1e-3) & (rows.speed[:, :N] > 1e-3)
    cosine = np.sum(ahead * rows.velocity[:, :N], axis=-1)[moving] / (gap * rows.speed[:, :N])[moving]
    assert cosine.min(initial=1.0) > 0.999
    standing = (rows.speed[:, :N] == 0) & (rows.speed[:, LOOKAHEAD:N + LOOKAHEAD] == 0)
    assert gap[standing].max(initial=0) < 1e-6  # the three points coincide in a hold


@given(st.sampled_from([n for n in FAMILY_NAMES if n.startswith(("reference", "contrast"))]), seeds)
@settings(max_examples=25)
def test_the_life_of_a_tracker_under_a_planner(name, seed):
    "All four kinds, a ramp before each hold, slow segments that never stand, minimum durations."
    rows = drawn(name, seed)
    least = {Kind.pass_through: 8, Kind.hold_or_brake: 36, Kind.low_speed_through: 30, Kind.recover_speed: 32}
    for kind, speed, brake in zip(rows.kind[:, :N], rows.speed[:, :N], rows.brake[:, :N]):
        assert set(kind.tolist()) == set(Kind)
        changes = [0, *(np.flatnonzero(np.diff(kind)) + 1), N]
        for first, last in pairwise(changes):
            if last < N:
                assert last - first >= least[Kind(kind[first])]
            if kind[first] == Kind.hold_or_brake:
                assert brake[first - 1] and speed[first - 1] <= 0.26 and not brake[first:last].any()
            if kind[first] == Kind.low_speed_through:
                assert speed[first:last].min() >= 0.15 and speed[first:last].max() <= 0.41
    ramps = np.diff(rows.speed[:, :N], axis=1)[rows.brake[:, 1:N] & rows.brake[:, :N - 1]]
    assert ramps.max() <= 1e-6  # slows down, never up


def test_equal_keys_draw_equal_sequences_and_other_keys_others():
    one, same, other = (drawn("curve", seed) for seed in (5, 5, 6))
    assert (one.position == same.position).all() and not (one.position == other.position).all()
    assert len(np.unique(one.position[:, 100, 0])) == 32  # rows differ from each other


def test_the_command_of_a_moment_is_what_the_sequence_holds():
    rows = draw_sequences(jax.random.key(0), mixture(line=1.0, point_hold=1.0), TABLE, 8)
    step = jnp.arange(8) * 40
    command = command_at(rows, jnp.arange(8), step)
    for i in range(8):
        np.testing.assert_array_equal(command.current[i], rows.position[i, 40 * i])
        np.testing.assert_array_equal(command.lookahead[i], rows.position[i, 40 * i + LOOKAHEAD])
    np.testing.assert_array_equal(command.rolling, ~np.asarray(rows.fixed))


def test_names_that_are_no_family_are_errors():
    with pytest.raises(ValueError, match=r"unknown command family 'lines': choose from hover, .*line"):
        mixture(lines=1.0)
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("stage", EXAMS)
def test_no_stage_practises_the_held_out_shapes(stage):
    weights = practised(stage)
    assert not set(weights) & set(HELD_OUT) and all(w > 0 for w in weights.values()) and set(weights) <= set(FAMILY_NAMES)
    assert set(HELD_OUT) == set(EXAMS["zigzag_or_lemniscate_tracking"].families)
