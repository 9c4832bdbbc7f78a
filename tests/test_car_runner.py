"""The runner from end to end: trained, judged over the wire, saved, read back; every failure a named result; and the known answers."""
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import car_tools
import numpy as np
import pytest

car_tools.need_car_extra()

import gymnasium as gym  # noqa: E402
from car_tools import nothing_left_behind, peer, stand_in  # noqa: E402, F401
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_car_environment import FRAME, actor  # noqa: E402

from rlnb.car.champion import ChampionTracker  # noqa: E402
from rlnb.car.rewards import SpeedRewardWrapper, progress_reward, speed_reward  # noqa: E402
from rlnb.car.runner import load_config, load_model, run_trial, trial  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
CAR = [sys.executable, "-m", "rlnb.cli.main", "car"]
SHORT = {"scene": "waveshare", "eval_episodes": 2, "select_every": 0, "simulator": "stand-in"}


def run(*words, timeout=240):
    return subprocess.run([*CAR, *map(str, words)], capture_output=True, text=True, timeout=timeout)


# ---- known answers

class Fixed(gym.Env):
    "One observation, its own reward of 7, and whatever info it is told to give."
    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Box(-1, 1, (2,))

    def __init__(self, info, terminated=False):
        self.info, self.terminated = info, terminated

    def reset(self, **options):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 7.0, self.terminated, False, self.info


@pytest.mark.parametrize(
    "info, reward",
    [
        ({"speed": 2.0, "cte": 0.0}, 2.0),
        ({"speed": 2.0, "cte": -4.0}, 1.0),
        ({"speed": 2.0, "cte": 8.0}, 0.0),
        ({"speed": 2.0, "cte": 80.0}, 0.0),
        ({"speed": np.float32(2), "cte": np.float64(2)}, 1.5),
    ],
)
def test_speed_reward_known_answers(info, reward):
    env = SpeedRewardWrapper(Fixed(info))
    assert env.step(None)[1] == reward and env.fallbacks == 0
    assert SpeedRewardWrapper(Fixed(info, True), crash_penalty=10.0).step(None)[1] == reward - 10
    assert SpeedRewardWrapper(Fixed(info, True), enabled=False).step(None)[1] == 7.0


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"speed": 1.0},
        {"cte": 1.0},
        {"speed": math.nan, "cte": 0.0},
        {"speed": 1.0, "cte": math.inf},
        {"speed": None, "cte": 0.0},
        {"speed": "1", "cte": 0.0},
    ],
)
def test_speed_reward_falls_back_and_counts(info):
    env = SpeedRewardWrapper(Fixed(info))
    assert [env.step(None)[1] for _ in range(3)] == [7.0] * 3 and env.fallbacks == 3


@given(st.floats(0, 4), st.floats(-50, 50), st.floats(0.5, 20))
def test_speed_reward_is_never_negative_nor_more_than_speed(speed, cte, max_cte):
    assert 0 <= speed_reward(speed, cte, max_cte) <= speed


@given(st.floats(-2, 2), st.floats(-20, 20), st.floats(1, 5))
def test_progress_reward_never_pays_for_going_back_or_off_the_road(gained, cte, half_width):
    reward = progress_reward(gained, cte, half_width)
    assert (
        reward <= max(gained, 0)
        and (reward == gained if gained <= 0 else reward >= 0)
        and (gained <= 0 or abs(cte) <= half_width or reward == 0)
    )


def test_champion_known_answer(tmp_path):
    lines = []
    tracker = ChampionTracker(tmp_path, log=lines.append)
    won = []
    for number, reward in enumerate([50, 80, 60, 90, 70]):
        model = tmp_path / f"trial-{number:04d}.zip"
        model.write_bytes(b"%d" % number)
        won += [number] * tracker.update_if_better(reward, {"lr": number}, model, number)
    assert won == [0, 1, 3] and tracker.model.read_bytes() == b"3"
    assert lines[-1] == "[CHAMPION] New best: mean_reward=90.00 params={'lr': 3}"
    assert set(json.loads(tracker.manifest.read_text())) >= {"trial", "timestamp", "params", "mean_reward", "model_path"}


def test_champion_of_two_processes_at_once(tmp_path):
    code = ("import sys; from pathlib import Path; from rlnb.car.champion import ChampionTracker\n"
            "home, start = Path(sys.argv[1]), int(sys.argv[2])\n"
            "for i in range(start, 60, 2):\n"
            "    path = home / f'{i}.zip'; path.write_bytes(b'%d' % i * 3000)\n"
            "    ChampionTracker(home, log=lambda t: None).update_if_better((i * 37) % 61, {}, path, i)\n")
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(k)]) for k in (0, 1)]
    assert [p.wait(60) for p in both] == [0, 0]
    best = ChampionTracker(tmp_path).best()
    assert best["mean_reward"] == max((i * 37) % 61 for i in range(60))
    assert (tmp_path / "champion" / "model.zip").read_bytes() == b"%d" % best["trial"] * 3000


# ---- trials

@pytest.mark.parametrize("agent, timesteps", [("ppo", 2048), ("dqn", 1200)])
def test_train_command_from_nothing(agent, timesteps, tmp_path):
    "No simulator anywhere: the stand-in is started, a model trained, judged, saved and read back; exit code 0."
    folder = tmp_path / agent
    done = run(
        "train",
        "--agent",
        agent,
        "--timesteps",
        timesteps,
        "--save-dir",
        folder,
        "--eval-episodes",
        2,
        "--scene",
        "waveshare",
        "--set",
        "select_every=0",
        "--champion",
        tmp_path,
        "--simulator",
        "stand-in",
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert out.startswith(f"[SB3 Runner] agent={agent} reward=progress") and "stand-in" in out.splitlines()[0]
    result = json.loads((folder / "result.json").read_text())
    assert (
        f"[SB3 Runner] mean_reward={result['mean_reward']:.4f}\n" in out and f"[SB3 Runner] std_reward={result['std_reward']:.4f}\n" in out
    )
    assert f"[SB3 Runner] timesteps={result['timesteps']}\n" in out and f"[SB3 Runner] model={folder / 'model.zip'}\n" in out
    assert (
        result["status"] == "ok"
        and result["timesteps"] >= timesteps
        and result["simulator"] == "stand-in"
        and len(result["drives"]) == 2
        and "over the wire" in result["judged"]
    )
    assert (tmp_path / "champion" / "model.zip").read_bytes() == (folder / "model.zip").read_bytes()
    model = load_model(folder / "model.zip")
    assert type(model).__name__.lower() == agent
    played = run("play", "--driver", folder / "model.zip", "--scene", "waveshare", "--fast", "--seconds", 5)
    assert played.returncode == 0 and "ended by" in played.stdout


def test_train_over_the_wire_and_pause(tmp_path):
    with stand_in() as server:
        lines = []
        config = load_config(
            timesteps=300, scene="waveshare", eval_episodes=1, simulator="wire", port=server.port, n_steps=64, batch_size=64, seed=3
        )
        result = trial(config, tmp_path, log=lines.append)
        assert result["status"] == "ok" and result["trained"] == "over the wire" and result["simulator"] == "external"
        assert str(server.port) in lines[0] and str(server.port) in result["judged"]


def test_auto_takes_the_simulator_that_answers(tmp_path):
    with stand_in() as server:
        result = trial(
            load_config(timesteps=64, scene="waveshare", eval_episodes=1, port=server.port, n_steps=64, batch_size=64),
            tmp_path,
            log=lambda line: None,
        )
        assert result["trained"] == "over the wire"


def test_rewards_are_named(tmp_path):
    for reward in ("speed", "own"):
        lines = []
        result = trial(load_config(timesteps=512, reward=reward, n_steps=64, **SHORT), tmp_path, log=lines.append)
        assert result["status"] == "ok" and f"reward={reward}" in lines[0]
    done = run("train", "--save-dir", tmp_path, "--reward-shaping", "--reward", "own")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "choose one" in done.stderr


def test_same_seed_same_policy(tmp_path):
    scores = [
        trial(load_config(timesteps=512, n_steps=64, seed=seed, **SHORT), tmp_path / str(i), log=lambda line: None)["drives"]
        for i, seed in enumerate((5, 5, 6))
    ]
    assert scores[0] == scores[1] != scores[2]


# ---- failures are results

def failed(config, folder, status, within=30):
    began, lines = time.monotonic(), []
    result = trial(config, folder, log=lines.append)
    assert result["status"] == status and "\n" not in result["error"] and time.monotonic() - began < within
    assert f"[SB3 Runner] status={status}: " in lines[-1] and not (Path(folder) / "model.zip").exists()
    assert json.loads((Path(folder) / "result.json").read_text())["status"] == status


def test_no_simulator(tmp_path):
    failed(load_config(timesteps=100, simulator="wire", port=9), tmp_path, "no_simulator")
    done = run("train", "--timesteps", 100, "--save-dir", tmp_path, "--port", 9)
    assert (
        done.returncode == 1
        and done.stderr.startswith("rlnb: error: no_simulator: ")
        and done.stderr.count("\n") == 1
        and "rlnb car sim" in done.stderr
    )


def test_unknown_scene(tmp_path):
    failed(load_config(timesteps=100, scene="monza"), tmp_path, "unknown_scene")


def wired(port):
    return load_config(timesteps=200, scene="warren", simulator="wire", port=port, n_steps=64, batch_size=64, eval_episodes=1)


def test_connection_lost_in_training(tmp_path):
    with peer(actor(*[FRAME] * 20, None, then="close")) as port:
        failed(wired(port), tmp_path, "connection_lost")


def test_nan_in_training(tmp_path):
    with peer(actor(*[FRAME] * 20, FRAME | {"cte": math.nan})) as port:
        failed(wired(port), tmp_path, "bad_telemetry")


def test_one_step_episodes_over_and_over(tmp_path):
    with peer(actor(FRAME | {"cte": 7.9}, FRAME | {"cte": 9.0})) as port:
        failed(wired(port), tmp_path, "one_step_episodes")


def test_deadline_inside_the_process_and_from_outside(tmp_path):
    began = time.monotonic()
    result = trial(load_config(timesteps=10**7, train_seconds=1e9, **SHORT), tmp_path, log=lambda line: None, deadline=3.0)
    assert result["status"] == "deadline" and time.monotonic() - began < 15
    began = time.monotonic()
    result = run_trial(load_config(timesteps=10**7, train_seconds=1e9, **SHORT), tmp_path / "own", 8.0, log=lambda line: None)
    assert result["status"] == "deadline" and time.monotonic() - began < 20


def test_a_killed_trial_is_a_crashed_one(tmp_path):
    import threading
    config = load_config(timesteps=10**7, train_seconds=1e9, **SHORT)

    def kill():
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for line in subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True).stdout.splitlines():
                if "rlnb.car.runner" in line and str(tmp_path) in line:
                    os.kill(int(line.split()[0]), signal.SIGKILL)
                    return
            time.sleep(0.1)

    killer = threading.Thread(target=kill)
    killer.start()
    result = run_trial(config, tmp_path, 120.0, log=lambda line: None)
    killer.join()
    assert result["status"] == "crashed"


def test_diverging_weights_are_noticed(tmp_path):
    failed(load_config(timesteps=1024, learning_rate=1e30, n_steps=64, **SHORT), tmp_path / "ppo", "diverged")
    failed(load_config(agent="dqn", timesteps=600, learning_rate=1e30, learning_starts=100, **SHORT), tmp_path / "dqn", "diverged")


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--save-dir", "x", "--set", "foo=1"),
        ("train", "--save-dir", "x", "--set", "foo"),
        ("train", "--save-dir", "x", "--agent", "sac"),
        ("train",),
        ("train", "--save-dir", "x", "--timesteps", "0"),
        ("eval", "--model", "none.zip"),
        ("eval", "--no-baselines"),
        ("play", "--driver", "none.zip"),
        ("play", "--driver", "keyboard"),
        ("play", "--scene", "monza"),
        ("sim", "--scene", "monza"),
        ("sim", "--port", "70000"),
        ("dance",),
    ],
)
def test_bad_input_is_one_line(words, tmp_path, capsys, monkeypatch):
    from rlnb.cli.main import main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["car", *words]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert error.startswith("rlnb: error: ") and error.count("\n") == 1, error


# ---- other commands

def test_help_says_what_the_stand_in_is():
    for command in ("sim", "train"):
        text = " ".join(run(command, "--help").stdout.split())
        assert "stand-in for the Unity DonkeyCar simulator" in text and "example: rlnb car" in text


def test_eval_prints_the_table(tmp_path):
    done = run("eval", "--scene", "waveshare", "--episodes", 1, "--json", tmp_path / "table.json")
    rows = json.loads((tmp_path / "table.json").read_text())
    assert done.returncode == 0 and "pure pursuit" in done.stdout and "stand-in simulator (not the real one)" in done.stdout
    assert rows[1]["clean"] == 1.0 and rows[0]["clean"] == 0.0 and rows[0]["lap_time"] is None  # no lap: null, since NaN is no JSON


def test_play_by_keyboard_in_a_terminal():
    main, other = pty.openpty()
    process = subprocess.Popen(
        [*CAR, "play", "--driver", "keyboard", "--scene", "warren"], stdin=other, stdout=other, stderr=other, close_fds=True
    )
    os.close(other)
    seen, end, pressed = b"", time.monotonic() + 60, 0
    try:
        while time.monotonic() < end and process.poll() is None:
            if select.select([main], [], [], 0.2)[0]:
                seen += os.read(main, 1 << 16)
            if b"lap 1" in seen and pressed < 12:
                os.write(main, b"w" if pressed < 11 else b"q")
                pressed += 1
                time.sleep(0.1)
    except OSError:
        pass
    process.wait(10)
    os.close(main)
    text = seen.decode(errors="replace")
    assert process.returncode == 0 and "\u2580" in text and "throttle 0.55" in text and "stopped by the driver" in text


def test_pursuit_beats_every_cheat_in_every_score():
    "The table of the judging notebook, from its own code, is a test of that notebook; here its claim once more for another track."
    from rlnb.car.drivers import Circling, PurePursuit, cutting, standing
    from rlnb.car.environment import LocalEnv
    from rlnb.car.judge import Watch, drive_episode
    from rlnb.car.simulator import WorldConfig
    drives = {}
    for name, make in {"honest": PurePursuit, "standing": lambda t: standing, "circling": lambda t: Circling(), "cutting": cutting}.items():
        env = Watch(LocalEnv(WorldConfig(scene="mini_monaco", barrier=30, gate=30)), 2, 60.0)
        drives[name] = drive_episode(env, make(env.unwrapped.centre_line()))[0]
    assert drives["honest"].clean and not any(d.clean for name, d in drives.items() if name != "honest")
    assert abs(drives["circling"].progress) < 0.1 and drives["standing"].progress == 0 and drives["cutting"].inside < 0.7
