"""`rlnb car`: the stand-in simulator, training, judging, playing and measuring. Torch and Numba are imported only by what needs them."""
import argparse
import contextlib
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlnb.cli.autoresearch import add_search_options
from rlnb.lab.errors import LabError

STAND_IN = (
    "A stand-in for the Unity DonkeyCar simulator: same protocol, no Unity, no display. Its tracks, its car and its pictures are its own; "
    "what a policy scores here is not what it would score in the real simulator."
)


def add_car_parser(commands) -> None:
    "Registers `rlnb car` and its subcommands with an argparse subparsers object."
    car = commands.add_parser("car", help="the DonkeyCar wing: simulate, train, judge, play", description="The DonkeyCar wing.",
                              epilog="example: rlnb car train --scene warehouse --save-dir data/runs/car-warehouse")
    car.set_defaults(parser=car)
    words = car.add_subparsers(dest="car_command", metavar="command", required=True)

    def command(name, function, help, example, description=None):
        sub = words.add_parser(
            name, help=help, description=description or help[0].upper() + help[1:] + ".", epilog=f"example: {example}", allow_abbrev=False
        )
        sub.set_defaults(function=lambda options: _guarded(function, options), parser=sub)
        return sub

    _sim_options(command("sim", sim, "run the stand-in simulator as a server", "rlnb car sim --scene warehouse --realtime", STAND_IN))
    _train_options(
        command(
            "train",
            train,
            "train a policy, judge it, save it",
            "rlnb car train --agent ppo --timesteps 5000 --save-dir data/runs/car-first",
            "Train a policy, judge it over the wire, save it. Without a simulator at host:port the stand-in is started. " + STAND_IN,
        )
    )
    sub = command(
        "trial",
        record_trial,
        "a recorded trial: train and examine in notebooks, with packets for the site",
        "rlnb car trial --scene warehouse",
    )
    sub.add_argument("--scene", default="generated_track", help="where to train and drive (default %(default)s)")
    sub.add_argument("--agent", choices=["ppo", "dqn"], default="ppo", help="default %(default)s")
    sub.add_argument("--reward", choices=["progress", "speed", "own"], default="progress", help="what is paid for (default %(default)s)")
    sub.add_argument("--seed", type=int, default=1, help="default %(default)s")
    sub.add_argument("--timesteps", type=_count, default=160_000, metavar="N", help="decisions at most (default %(default)s)")
    sub.add_argument("--train-seconds", type=float, default=150.0, metavar="S", help="seconds of training at most (default %(default)s)")
    sub.add_argument("--episodes", type=_count, default=10, metavar="K", help="drives of the exam (default %(default)s)")
    sub.add_argument("--verbose", action="store_true", help="show what the notebooks print")
    sub = command(
        "eval",
        evaluate,
        "judge saved policies beside random actions and pure pursuit",
        "rlnb car eval --model data/runs/car-first/model.zip --scene warehouse --episodes 10",
    )
    sub.add_argument("--model", action="append", default=[], type=Path, metavar="ZIP", help="a saved policy; may be given several times")
    sub.add_argument("--scene", default="generated_track", help="where to drive (default %(default)s)")
    sub.add_argument("--episodes", type=_count, default=10, metavar="K", help="episodes for each driver (default %(default)s)")
    sub.add_argument("--no-baselines", action="store_true", help="only the saved policies")
    sub.add_argument("--json", type=Path, metavar="F", help="write the table there as JSON too")
    _address(sub, "a simulator to drive in (default: a stand-in started for this)")
    _difficulty(sub)
    sub = command(
        "play",
        play,
        "drive by keyboard, or watch pure pursuit or a policy, in the terminal",
        "rlnb car play --driver pursuit --scene mini_monaco --laps 1",
    )
    sub.add_argument(
        "--driver", default="pursuit", metavar="D", help="pursuit, keyboard, or the path of a saved policy (default %(default)s)"
    )
    sub.add_argument("--scene", default="generated_track", help="where to drive (default %(default)s)")
    sub.add_argument("--laps", type=_count, default=2, help="stop after so many laps (default %(default)s)")
    sub.add_argument("--seconds", type=float, default=120.0, help="stop after so many seconds (default %(default)s)")
    sub.add_argument("--fast", action="store_true", help="as fast as the machine instead of 20 frames a second")
    sub.add_argument("--no-picture", action="store_true", help="only a line of numbers")
    _address(sub, "a simulator to drive in (default: a stand-in started for this)")
    add_search_options(
        command(
            "autoresearch",
            research,
            "search the settings of training by itself, in short trials",
            "rlnb car autoresearch --trials 12 --min-trials-before-gp 3 --push-every 4",
            "Search the settings of training: random trials first, then a Gaussian process. " + STAND_IN,
        )
    )
    sub = command("bench", bench, "measure frames, steps and decisions per second on this machine", "rlnb car bench --seconds 3")
    sub.add_argument("--seconds", type=float, default=3.0, help="time for each measurement (default %(default)s)")
    sub.add_argument("--json", type=Path, metavar="F", help="write the figures there as JSON too")


def _count(text):
    value = int(text.replace("_", "")) if text.replace("_", "").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return value


def _address(sub, what):
    sub.add_argument("--host", help=f"address of {what}")
    sub.add_argument("--port", type=int, help="its port (default 9091)")
    sub.add_argument(
        "--client", choices=["own", "gym-donkeycar"], default="own", help="our client or upstream's gym_donkeycar (1.3.1 or later)"
    )


def _difficulty(sub):
    sub.add_argument("--latency", type=float, default=0.0, metavar="S", help="seconds from a command to its effect (stand-in only)")
    sub.add_argument(
        "--image-noise",
        type=float,
        default=3.0,
        metavar="A",
        help="amplitude of brightness noise, 0-255 (stand-in only, default %(default)s)",
    )
    sub.add_argument(
        "--camera-hz", type=float, default=20.0, metavar="HZ", help="frames per second of the camera (stand-in only, default %(default)s)"
    )


def _sim_options(sub):
    sub.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s: this machine only)")
    sub.add_argument("--port", type=int, default=9091, help="port to listen at, 0 for any free one (default %(default)s)")
    sub.add_argument("--scene", default="", help="load this scene for every client (default: the client chooses)")
    sub.add_argument(
        "--realtime",
        action="store_true",
        help="20 frames a second by the clock, as the real simulator; default: lock-step, one frame per control message",
    )
    sub.add_argument("--seed", type=int, default=0, help="of noise, starts and generated roads (default %(default)s)")
    sub.add_argument("--race-laps", type=int, default=0, metavar="N", help="announce race_start, and race_stop after N laps")
    sub.add_argument(
        "--max-clients", type=_count, default=8, metavar="N", help="cars at once, each in a world of its own (default %(default)s)"
    )
    _difficulty(sub)


def _train_options(sub):
    sub.add_argument("--agent", choices=["ppo", "dqn"], help="default ppo")
    sub.add_argument("--timesteps", type=_count, metavar="N", help="decisions to train for, such as 5000")
    sub.add_argument("--learning-rate", type=float, metavar="LR")
    sub.add_argument("--save-dir", type=Path, required=True, metavar="DIR", help="where model.zip and result.json go")
    sub.add_argument("--eval-episodes", type=_count, metavar="K", help="episodes to judge by (default 10)")
    sub.add_argument(
        "--reward",
        choices=["progress", "speed", "own"],
        help="what is paid for: progress on the road (default), speed near the centre line, or the environment's own reward",
    )
    sub.add_argument("--reward-shaping", action="store_true", help="the same as --reward speed")
    sub.add_argument("--seed", type=int, help="default 1")
    sub.add_argument("--scene", help="where to train and judge (default generated_track)")
    sub.add_argument(
        "--simulator",
        choices=["auto", "stand-in", "wire"],
        help="auto (default): what answers at host:port, else the stand-in, trained in process and judged over the wire",
    )
    _address(sub, "a simulator")
    _difficulty(sub)
    sub.add_argument("--config", type=Path, metavar="TOML", help="settings instead of data/car/defaults.toml")
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting of that file, such as --set ent_coef=0.01"
    )
    sub.add_argument(
        "--deadline",
        type=float,
        default=1800.0,
        metavar="S",
        help="end the trial after so many seconds, whatever it is doing (default %(default)s)",
    )
    sub.add_argument("--champion", type=Path, metavar="DIR", help="make the model DIR/champion/model.zip if it is the best so far")


def _guarded(function, options) -> int:
    "Runs a command; what the wing calls an error becomes one line."
    missing = [name for name in ("cv2", "gymnasium", "numba", "stable_baselines3", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(f"the car wing needs {', '.join(missing)}; install its extra: .venv/bin/pip install -c constraints.txt -e '.[car]'")
    from rlnb.car.protocol import CarError
    try:
        return function(options)
    except CarError as error:
        raise LabError(f"{error.status}: {error}") from error


# ---- sim

def sim(options) -> int:
    from rlnb.car.protocol import scene_of
    from rlnb.car.server import ServerConfig, SimulatorServer
    from rlnb.car.simulator import WorldConfig

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    world = WorldConfig(
        seed=options.seed,
        latency=options.latency,
        image_noise=options.image_noise,
        camera_hz=options.camera_hz,
        race_laps=options.race_laps,
    )
    server = SimulatorServer(
        ServerConfig(
            host=options.host,
            port=options.port,
            realtime=options.realtime,
            scene=scene_of(options.scene) if options.scene else "",
            world=world,
            quit_app=True,
            max_clients=options.max_clients,
        )
    )
    pace = "20 frames a second" if options.realtime else "lock-step"
    print(f"stand-in simulator (not the Unity simulator) on {server.host}:{server.port}, {pace}; Ctrl-C ends it", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also when started in the background of a script, which ignores it
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    print(f"{server.steps} control messages answered", flush=True)
    return 0


# ---- train

def train(options) -> int:
    from rlnb.car.runner import load_config, trial

    changes = dict(_setting(text) for text in options.set)
    for name in (
        "agent",
        "timesteps",
        "learning_rate",
        "eval_episodes",
        "reward",
        "seed",
        "scene",
        "simulator",
        "host",
        "port",
        "client",
        "latency",
        "image_noise",
        "camera_hz",
    ):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    if options.reward_shaping:
        if options.reward not in (None, "speed"):
            raise LabError(f"--reward-shaping is --reward speed, but --reward {options.reward} was given too; choose one")
        changes["reward"] = "speed"
    if (options.host or options.port or options.client != "own") and options.simulator is None:
        changes["simulator"] = "wire"  # an address was named: a simulator must answer there
    config = load_config(options.config, **changes)
    bar = _Bar(config.timesteps)
    result = trial(config, options.save_dir, log=bar.log, on_progress=bar.update, deadline=options.deadline)
    if result["status"] != "ok":
        raise LabError(f"{result['status']}: {result['error']}")
    if options.champion:
        from rlnb.car.champion import ChampionTracker

        ChampionTracker(options.champion).update_if_better(
            result["mean_reward"],
            {"agent": config.agent, "reward": config.reward, "seed": config.seed, **config.algorithm},
            result["model_path"],
        )
    if result["simulator"] == "stand-in":
        print("trained and judged in the stand-in simulator, not in the real one")
    print(f"drive it: rlnb car play --driver {result['model_path']} --scene {config.scene}")
    return 0


def _setting(text):
    key, equals, value = text.partition("=")
    if not equals:
        raise LabError(f"--set {text}: write KEY=VALUE, such as --set ent_coef=0.01")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


class _Bar:
    "Progress of a training on a terminal; plain lines now and then elsewhere."

    def __init__(self, total):
        self.bar, self.told, self.total, self.note = None, time.monotonic(), total, ""
        if sys.stderr.isatty():
            from tqdm import tqdm
            self.bar = tqdm(total=total, unit="decision", unit_scale=True, dynamic_ncols=True, leave=False)

    def update(self, line):
        if line.get("validation_laps") is not None:
            self.note = f"validation: {line['validation_clean']:.0%} clean, {line['validation_progress']:.2f} laps" + (
                f", {line['validation_lap_time']:.1f} s" if line["validation_laps"] else ""
            )
        if self.bar is not None:
            self.bar.update(line["step"] - self.bar.n)
            self.bar.set_postfix_str(self.note)
        elif time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            print(
                f"step {line['step']}/{self.total}, {line['steps_per_s']:.0f} decisions/s, {self.note or 'no validation yet'}", flush=True
            )

    def close(self):
        if self.bar is not None:
            self.bar.close()

    def log(self, text):
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
            if "mean_reward" in text:
                self.bar.close()
        else:
            print(text, flush=True)


# ---- trial

def record_trial(options) -> int:
    "A run of kind car: the two notebooks, the gate, the site. Exit code 0 passed, 2 not passed."
    from rlnb.car.protocol import scene_of
    from rlnb.cli.ladder import address, closing
    from rlnb.lab.gates import check, load_gates
    from rlnb.lab.runs import Run
    from rlnb.lab.settings import load_settings
    from rlnb.lab.site import publish

    settings, scene = load_settings(), scene_of(options.scene)
    gates = load_gates(settings.root / "data" / "car" / "gates.toml")
    parameters = {"scene": scene, "agent": options.agent, "reward": options.reward, "timesteps": options.timesteps,
                  "train_seconds": options.train_seconds}
    run = Run.create(settings, "car_drive", parameters, options.seed, kind="car", configs=sorted((settings.root / "data" / "car").glob("*.toml")))
    with closing(run):
        run.start()
        _notebook(settings, run, "car_trial", {**parameters, "seed": options.seed, "simulator": "stand-in"}, ["evaluations/best.json"], options)
        _notebook(settings, run, "car_exam", {"scene": scene, "checkpoint": str(run.checkpoints / "best"), "episodes": options.episodes},
                  ["evaluations/exam.json"], options)
        verdict = check(gates, "car_drive", run.evaluation("exam")["metrics"])
        run.save_evaluation("verdict", verdict.to_dict())
        run.finish("passed" if verdict.passed else "failed", None if verdict.passed else f"gate: {'; '.join(verdict.reasons)}")
    print(verdict)
    print(address(publish(settings)))
    return 0 if verdict.passed else 2


def _notebook(settings, run, name, parameters, artefacts, options):
    from rlnb.lab.notebooks import execute

    print(f"{name}: run {run.id} ...", flush=True)
    bar = _Bar(options.timesteps)
    progress = lambda rows: [bar.update(row) for row in rows]  # noqa: E731
    execute(settings.root / "nbs" / "stages" / f"{name}.ipynb", settings.packets / run.id / f"{name}.ipynb",
            {"run_dir": str(run.folder), "root": str(settings.root), **parameters}, run=run, settings=settings, artefacts=artefacts,
            on_progress=progress if name == "car_trial" else None, on_output=(lambda text: print(text, end="", flush=True)) if options.verbose else None)
    bar.close()


# ---- autoresearch

def research(options) -> int:
    from rlnb.cli.autoresearch import autoresearch
    from rlnb.lab.settings import load_settings

    return autoresearch(load_settings(), options, "car")


# ---- eval

def evaluate(options) -> int:
    from rlnb.car.compare import compare, table_text
    from rlnb.car.runner import write_json

    if not options.model and options.no_baselines:
        raise LabError("nothing to judge: name a policy with --model, or leave out --no-baselines")
    rows = compare(
        options.scene,
        options.model,
        options.episodes,
        baselines=not options.no_baselines,
        host=options.host,
        port=options.port,
        client=options.client,
        latency=options.latency,
        image_noise=options.image_noise,
        camera_hz=options.camera_hz,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(table_text(rows))
    external = options.host or options.port
    print(
        f"{options.episodes} episodes each, judged over the wire "
        + (f"at {options.host or '127.0.0.1'}:{options.port or 9091}" if external else "in the stand-in simulator (not the real one)")
    )
    if options.json:
        write_json(options.json, rows)
    return 0


# ---- play

KEYS = {
    "a": (-0.34, 0),
    "d": (0.34, 0),
    "w": (0, 0.05),
    "s": (0, -0.08),
    "\x1b[D": (-0.34, 0),
    "\x1b[C": (0.34, 0),
    "\x1b[A": (0, 0.05),
    "\x1b[B": (0, -0.08),
}


class _Keyboard:
    "Steering and throttle from a terminal's keys; the wheel returns to the middle by itself."

    def __enter__(self):
        import termios
        import tty
        if not sys.stdin.isatty():
            raise LabError("--driver keyboard needs a terminal; use --driver pursuit, or run it in one")
        self.old = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        self.steering, self.throttle, self.quit = 0.0, 0.0, False
        return self

    def __exit__(self, *_):
        import termios
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self.old)

    def __call__(self, info):
        self.steering *= 0.8
        while select.select([sys.stdin], [], [], 0)[0]:
            key = os.read(sys.stdin.fileno(), 1).decode(errors="ignore")
            if key == "\x1b" and select.select([sys.stdin], [], [], 0.01)[0]:
                key += os.read(sys.stdin.fileno(), 2).decode(errors="ignore")
            if key in ("q", "\x1b"):
                self.quit = True
            wheel, pedal = KEYS.get(key, (0, 0))
            self.steering, self.throttle = min(max(self.steering + wheel, -1), 1), min(max(self.throttle + pedal, 0), 1)
            if key == " ":
                self.throttle = 0.0
        return self.steering, self.throttle


def play(options) -> int:
    from rlnb.car.environment import DonkeyEnv
    from rlnb.car.judge import Watch
    from rlnb.car.protocol import PORT, scene_of
    from rlnb.car.server import ServerConfig, SimulatorServer

    scene = scene_of(options.scene)
    with contextlib.ExitStack() as stack:
        keyboard = stack.enter_context(_Keyboard()) if options.driver == "keyboard" else None
        host, port = options.host or "127.0.0.1", options.port or PORT
        if not (options.host or options.port):
            server = stack.enter_context(SimulatorServer(ServerConfig(port=0)))
            host, port = server.host, server.port
        if options.client == "gym-donkeycar":
            from rlnb.car.upstream import UpstreamEnv
            env = UpstreamEnv(scene, host, port)
        else:
            env = DonkeyEnv(scene, host, port)
        env = Watch(env, options.laps, options.seconds)
        stack.callback(env.close)
        drive = _drive(env, options, keyboard)
    print(
        f"{drive.laps} laps, best {drive.lap_time:.2f} s, {drive.inside:.0%} of the time on the road, left it {drive.off_road} times, "
        f"ended by: {drive.end}"
        if drive
        else "stopped by the driver"
    )
    return 0


def _drive(env, options, keyboard):
    "One episode at the terminal; its `Drive`, or None if the driver stopped."
    step, state = _player(env, options, keyboard)
    observation, info = state
    frame, due = 0, time.monotonic()
    picture = sys.stdout.isatty() and not options.no_picture
    while True:
        observation, info, over = step(observation, info)
        frame += 1
        if picture:
            print(_screen(env.unwrapped.image, info), end="", flush=True)
        elif frame % 40 == 0:
            print(_line(info), flush=True)
        if over:
            return info["drive"]
        if keyboard is not None and keyboard.quit:
            return None
        if not options.fast:
            due += 0.05
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 0.2)


def _player(env, options, keyboard):
    "A function (observation, info) -> (observation, info, over) for the chosen driver, and the first observation and info."
    if keyboard is None and options.driver != "pursuit":
        from rlnb.car.runner import load_model, vision_beside
        from rlnb.car.wrappers import with_vision
        model = load_model(options.driver)
        seen = with_vision(env, vision_beside(options.driver), discrete=hasattr(model.action_space, "n"))
        chosen = lambda observation, info: seen.step(model.predict(observation, deterministic=True)[0])  # noqa: E731
        state = seen.reset()
    else:
        state = env.reset()
        if keyboard is None:
            from rlnb.car.drivers import PurePursuit
            track = env.unwrapped.centre_line()
            if track is None:
                raise LabError(
                    "--driver pursuit needs the road's centre line, which this simulator does not tell; use --driver keyboard or a policy"
                )
            keyboard = PurePursuit(track)
        chosen = lambda observation, info: env.step(keyboard(info))  # noqa: E731

    def step(observation, info):
        observation, _, terminated, truncated, info = chosen(observation, info)
        return observation, info, terminated or truncated
    return step, state


def _line(info):
    return (
        f"lap {info['lap_count'] + 1}  progress {info['progress']:6.2f}  speed {8 * info['forward_vel']:5.1f} u/s"
        f"  off the line {info['cte']:+5.2f} u"
        f"  wheel {info['command'][0]:+.2f}  throttle {info['command'][1]:.2f}"
    )


def _screen(image, info):
    "The camera's picture in half blocks of colour, two pixels to a character, and a line of numbers under it."
    import cv2
    small = cv2.resize(image, (80, 50), interpolation=cv2.INTER_AREA)
    rows = [
        "".join(f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m\u2580" for a, b in zip(small[y], small[y + 1])) + "\x1b[0m"
        for y in range(0, 50, 2)
    ]
    return "\x1b[H\x1b[J" + "\n".join(rows) + f"\n{_line(info)}\nw/s throttle, a/d wheel, space: no throttle, q: quit\n"


# ---- bench

def bench(options) -> int:
    from rlnb.car.bench import decision_rate, frame_rate, local_rate, wire_rate
    from rlnb.car.runner import write_json

    load, cores = os.getloadavg()[0], os.cpu_count()  # before we add to it
    figures = {
        "RGB frames/s in process (120 x 160)": frame_rate(options.seconds),
        "the same without image noise": frame_rate(options.seconds, noise=0.0),
        "environment steps/s in process": local_rate(options.seconds),
    }
    with simulator_process() as port:
        figures["steps/s over TCP, our client, server in a process of its own"] = wire_rate(options.seconds, port)
    figures["decisions/s of PPO while it learns (8 cars, 2 frames each)"] = decision_rate(options.seconds)
    for name, rate in figures.items():
        print(f"{rate:10,.0f}  {name}")
    print(f"each in the fastest hundredth of a second of {options.seconds:g} s, the last over whole rollouts; load before: {load:.1f} on {cores} cores")
    if options.json:
        write_json(options.json, {**figures, "load": load, "cores": cores})
    return 0


@contextlib.contextmanager
def simulator_process(*arguments):
    "A stand-in server in a process of its own; yields its port, and ends it on every path."
    process = subprocess.Popen(
        [sys.executable, "-m", "rlnb.cli.main", "car", "sim", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline()
        if " on " not in line:
            raise LabError(f"the stand-in did not start: {line.strip() or 'it said nothing'}")
        yield int(line.split(" on ")[1].split(",")[0].rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
