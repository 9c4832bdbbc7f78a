"""Level files: what they say, and what is refused."""
import pytest

from rlnb.race.levels import LEVEL3_SHA256, LevelError, Range, hash_clean, load_level

FIXED = {"gate_position": ((0.5, 0.25, 0.7), (1.05, 0.75, 1.2), (-1.0, -0.25, 0.7), (0.0, -0.75, 1.2)),
         "yaw": (-0.78, 2.35, 3.14, 0.0), "pole": ((0.0, 0.75), (1.0, 0.25), (-1.5, -0.25), (-0.5, -0.75))}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_fixed_course(number):
    level = load_level(number)
    assert level.gate_position == FIXED["gate_position"] and tuple(rpy[2] for rpy in level.gate_rpy) == FIXED["yaw"]
    assert tuple(top[:2] for top in level.pole_top) == FIXED["pole"] and {top[2] for top in level.pole_top} == {1.55}
    assert level.start_position == (-1.5, 0.75, 0.01) and not level.random_layout and not hash_clean(level)
    assert (level.spread.mass != Range((0.0,), (0.0,))) == (number >= 1)
    assert (level.spread.pole_top != Range((0.0,) * 3, (0.0,) * 3)) == (number >= 2)


def test_level_3_is_what_the_rules_say():
    level = load_level("3")
    assert hash_clean(level) and level.sha256 == LEVEL3_SHA256 and level.random_layout
    assert (level.steps, level.sensing_range, level.action_noise, level.force) == (1500, 0.7, 0.001, 0.1)
    assert level.arena == Range((-2.5, -1.5, -0.001), (2.5, 1.5, 2.0)) and level.start_position == level.start_rpy == (0.0, 0.0, 0.0)
    spread = level.spread
    assert spread.start_position == Range((-0.1, -0.1, 0.0), (0.1, 0.1, 0.02)) and spread.start_rpy == Range((-0.1,) * 3, (0.1,) * 3)
    assert spread.mass == Range((-0.005,), (0.005,)) and spread.inertia == Range((-1e-6,) * 3, (1e-6,) * 3)
    assert spread.gate_position == Range((-0.15, -0.15, -0.1), (0.15, 0.15, 0.1))
    assert spread.gate_rpy == Range((-0.05, -0.1, -0.2), (0.05, 0.1, 0.2))
    assert spread.pole_top == Range((-0.15, -0.15, -0.05), (0.15, 0.15, 0.05))


@pytest.fixture
def changed(tmp_path):
    "A copy of a level in which one piece of text is replaced by another."
    def write(old: str, new: str, number: int = 2):
        text = load_level(number).path.read_text()
        assert old in text
        path = tmp_path / "changed.toml"
        path.write_text(text.replace(old, new, 1))
        return path
    return write


@pytest.mark.parametrize("old, new, words", [
    ("steps = 1500", "stepz = 1500", "steps is missing"),
    ("steps = 1500", "steps = 1500\nwind = 3", "wind is not a key of a level"),
    ("steps = 1500", "steps = 0", "steps is 0"),
    ("steps = 1500", "steps = true", "steps is True"),
    ("steps = 1500", "steps = 1500.0", "steps is 1500.0: a whole number"),
    ("random_layout = false", "random_layout = 0", "random_layout is 0: true or false"),
    ("sensing_range = 0.7", "sensing_range = -0.7", "sensing_range is -0.7"),
    ("sensing_range = 0.7", "sensing_range = inf", "sensing_range is inf"),
    ("sensing_range = 0.7", 'sensing_range = "far"', "sensing_range is 'far'"),
    ("force = 0.1", "force = nan", "disturbance.force is nan"),
    ("force = 0.1", "forze = 0.1", "disturbance.force is missing"),
    ("[[gate]]\nposition = [1.05, 0.75, 1.2]\nrpy = [0.0, 0.0, 2.35]\n", "", "gate appears 3 times: 4 are needed"),
    ("position = [1.05, 0.75, 1.2]", "position = [1.05, 0.75]", r"gate\[1\].position is \[1.05, 0.75\]: a list of 3"),
    ("rpy = [0.0, 0.0, 2.35]", "rpy = [0.0, 0.0, nan]", r"gate\[1\].rpy"),
    ("rpy = [0.0, 0.0, 2.35]", "rpy = 2.35", r"gate\[1\].rpy is 2.35"),
    ("rpy = [0.0, 0.0, 2.35]", "rpy = [0.0, 0.0, 2.35]\nsize = 1", r"gate\[1\].size is not a key"),
    ("[[pole]]\ntop = [1.0, 0.25, 1.55]\n", "", "pole appears 3 times"),
    ("top = [1.0, 0.25, 1.55]", "top = [1.0, 0.25, 2.55]", r"pole\[1\].top .* not inside the arena"),
    ("position = [1.05, 0.75, 1.2]", "position = [2.45, 0.75, 1.2]", r"gate\[1\].position .* with its spread"),
    ("position = [-1.5, 0.75, 0.01]", "position = [-2.6, 0.75, 0.01]", r"start.position .* not inside the arena"),
    ("high = [2.5, 1.5, 2.0]", "high = [2.5, -1.5, 2.0]", "arena .* has no inside|arena reaches"),
    ("low = [-0.15, -0.15, -0.1], high = [0.15, 0.15, 0.1]", "low = [0.2, 0, 0], high = [0, 0, 0]", "spread.gate_position reaches from"),
    ("low = [-0.005], high", "low = [-0.05], high", "spread.mass takes 0.05 kg off a drone"),
    ("low = [-1e-6, -1e-6, -1e-6]", "low = [-1e-4, -1e-6, -1e-6]", "spread.inertia takes"),
    ("mass = {", "mess = {", "spread.mess is not a key"),
    ("[start]", "[start", "is no TOML"),
])
def test_what_is_refused(changed, old, new, words):
    with pytest.raises(LevelError, match=words) as error:
        load_level(changed(old, new))
    assert "changed.toml: " in str(error.value)


def test_an_arena_too_small_for_a_random_layout(changed):
    with pytest.raises(LevelError, match="too small for a random layout"):
        load_level(changed("low = [-2.5, -1.5, -0.001]\nhigh = [2.5, 1.5, 2.0]", "low = [-2.5, -0.5, -0.001]\nhigh = [2.5, 0.5, 2.0]", 3))


@pytest.mark.parametrize("level", [7, "nowhere.toml"])
def test_a_file_that_is_not_there(level):
    with pytest.raises(LevelError, match=r"cannot be read .*levels 0 to 3"):
        load_level(level)


def test_one_digit_is_enough(changed):
    "The hash is of the bytes: even a change in a comment shows."
    assert hash_clean(load_level(changed("steps = 1500", "steps = 1500", 3)))
    assert not hash_clean(load_level(changed("gates and poles stand", "gates and pales stand", 3)))
    assert not hash_clean(load_level(changed("force = 0.1", "force = 0.2", 3)))
