"""Settings: three places, one winner, no silent typo."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.errors import LabError
from rlnb.lab.settings import SETTINGS, find_root, load_settings, read_seeds, show_seeds

seeds = st.lists(st.integers(0, 10_000), min_size=1, max_size=30, unique=True)


@given(seeds)
def test_seeds_survive_being_shown(values):
    assert read_seeds(show_seeds(values)) == tuple(values)


@pytest.mark.parametrize("text", ["", "1,,2", "5-3", "a", "1-", "1.5", "1 2", "3, 3", "-4", "0-99999999"])
def test_what_is_no_list_of_seeds(text):
    with pytest.raises(ValueError):
        read_seeds(text)


def test_flags_beat_the_environment_beats_the_file(project):
    def load(env, flags):
        return load_settings(project.root, env=env, flags=flags)
    assert load({}, {}).seed == 1 and load({}, {}).sources["seed"] == "settings.ini"
    assert load({"RLNB_SEED": "2"}, {}).seed == 2 and "RLNB_SEED" in load({"RLNB_SEED": "2"}, {}).sources["seed"]
    assert load({"RLNB_SEED": "2"}, {"seed": "3"}).seed == 3 and "--seed" in load({}, {"seed": "3"}).sources["seed"]


BAD = {
    "an unknown key": (("seed = 1", "sede = 1"), "'sede'", "'seed'"),
    "an unknown section": (("[seeds]", "[sedes]"), "[sedes]", "'seeds'"),
    "a key in another section": (("[seeds]", "[seeds]\nworkers = 2"), "'workers'", "[seeds]"),
    "a missing key": (("workers = 1\n", ""), "workers", "missing"),
    "a key that stands twice": (("seed = 1", "seed = 1\nseed = 2"), "settings.ini", "seed"),
    "a line without a value": (("seed = 1", "seed"), "settings.ini", "key = value"),
    "a negative seed": (("seed = 1", "seed = -1"), "'-1'", "whole number"),
    "a fraction": (("workers = 1", "workers = 1.5"), "'1.5'", "whole number"),
    "no worker": (("workers = 1", "workers = 0"), "'0'", "from 1"),
    "a wrong mode": (("wandb_mode = disabled", "wandb_mode = on"), "'on'", "offline, online, disabled"),
    "a wrong duration": (("deadline = 2 h", "deadline = soon"), "'soon'", "20 min"),
    "a wrong scheduler": (("scheduler = local", "scheduler = http://x"), "'http://x'", "tcp://host:port"),
    "a wrong language": (("reader_language = en", "reader_language = de"), "'de'", "en, zh"),
    "an empty folder": (("runs = data/runs", "runs ="), "runs", "a folder"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_slip_in_the_file_is_one_line_with_file_key_and_what_is_allowed(project, what):
    change, *words = BAD[what]
    project.edit("settings.ini", *change)
    done = project.rlnb("settings")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "settings.ini" in done.stderr, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_misspelt_variables_and_flags(project):
    done = project.rlnb("settings", RLNB_SEEED="3")
    assert done.returncode == 1 and "RLNB_SEEED" in done.stderr and "'RLNB_SEED'" in done.stderr
    done = project.rlnb("settings", "--seeed", "3")
    assert done.returncode == 1 and "--seeed" in done.stderr and "'--seed'" in done.stderr and done.stderr.count("\n") == 1
    done = project.rlnb("settings", "--seed", "three")
    assert done.returncode == 1 and "flag --seed" in done.stderr


def test_every_setting_is_printed_with_its_origin(project):
    done = project.rlnb("settings", "--workers", "3", RLNB_SEED="9")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(SETTINGS) < set(lines)
    assert "flag --workers" in lines["workers"] and "environment RLNB_SEED" in lines["seed"] and "settings.ini" in lines["runs"]


def test_the_root_is_found_from_below_and_missed_from_outside(project, tmp_path):
    deep = project.root / "data" / "deep"
    deep.mkdir()
    assert find_root(deep) == project.root
    with pytest.raises(LabError, match=r"settings\.ini"):
        find_root(tmp_path)
    assert project.rlnb("settings", "--root", tmp_path).returncode == 1
