"""The protocol over real sockets: every message, packets split at every byte and merged, and what a client may not do."""
import base64
import json
import math
import socket
import time

import car_tools
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

car_tools.need_car_extra()

from car_tools import LIDAR, Talker, nothing_left_behind, stand_in  # noqa: E402, F401

from rlnb.car.protocol import CLIENT_MESSAGES, SCENES, SERVER_MESSAGES, MessageParser, decode_image, encode, telemetry_of  # noqa: E402
from rlnb.car.simulator import WorldConfig  # noqa: E402
from rlnb.car.tracks import named_track  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
CAMERA = {
    "fov": 0,
    "fish_eye_x": 0.0,
    "fish_eye_y": 0.0,
    "img_w": 0,
    "img_h": 0,
    "img_d": 0,
    "img_enc": 0,
    "offset_x": 0.0,
    "offset_y": 0.0,
    "offset_z": 0.0,
    "rot_x": 0.0,
}

text = st.text(max_size=20)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "msg_type": text,
            "a": text | st.floats(allow_nan=False) | st.none(),
            "nested": st.dictionaries(text, st.lists(text, max_size=3), max_size=3),
        }
    ),
    max_size=5,
)


@settings(deadline=None, max_examples=150)
@given(messages, st.lists(st.integers(0, 400), max_size=12), st.sampled_from(["", "\n", " \r\n "]), st.booleans())
def test_parser_finds_what_was_sent_however_it_is_cut(sent, cuts, between, ascii):
    stream = "".join(json.dumps(m, ensure_ascii=ascii) + between for m in sent).encode()
    parser, heard, last = MessageParser(), [], 0
    for cut in [*sorted(min(c, len(stream)) for c in cuts), len(stream)]:
        heard += parser.feed(stream[last:cut])
        last = cut
    assert heard == sent


@pytest.mark.parametrize(
    "junk",
    [
        b"hello",
        b"}",
        b"[1]",
        b'{"no":"type"}',
        b'{"msg_type": 5}',
        b'{"msg_type":"a",}',
        b"{" * 40,
        b'{"msg_type":"\xff"}',
        b'{"msg_type":"' + b"x" * 70000,
    ],
)
def test_parser_refuses_what_is_no_message(junk):
    with pytest.raises(ValueError):
        MessageParser(1 << 16).feed(junk)


def test_parser_looks_at_every_byte_once():
    frame = json.dumps({"msg_type": "telemetry", "image": "A" * 400_000}).encode()
    parser, began = MessageParser(1 << 20), time.perf_counter()
    for i in range(0, len(frame), 16):
        parser.feed(frame[i : i + 16])
    assert time.perf_counter() - began < 5  # quadratic scanning would take minutes


@given(
    st.sampled_from([f for f in ("cte", "speed", "pos_x", "time", "activeNode")]), st.sampled_from([math.nan, math.inf, "1.0", None, True])
)
def test_telemetry_with_an_unusable_number_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        telemetry_of({"msg_type": "telemetry", field: value})


def in_scene(server, scene="waveshare"):
    talker = Talker(server)
    talker.hear("scene_selection_ready")
    talker.say("load_scene", scene_name=scene)
    talker.hear("car_loaded")
    return talker


def test_handshake_versions_scenes_and_the_way_back():
    with stand_in() as server, Talker(server) as talker:
        assert talker.hear("scene_selection_ready")["loaded"] == "1"
        talker.say("get_protocol_version")
        assert talker.hear("protocol_version")["version"] == "2"
        talker.say("get_scene_names")
        assert talker.hear("scene_names")["scene_names"] == list(SCENES)
        for scene in SCENES:
            talker.say("load_scene", scene_name=scene)
            talker.hear("car_loaded")
            assert talker.control()["totalNodes"] == len(named_track(scene).points)
        talker.say("exit_scene")
        talker.hear("scene_selection_ready")
        talker.say("control", steering=0, throttle=0, brake=0)  # in the menu there is no car: no answer, no harm
        talker.say("load_scene", scene_name="no such scene")  # as the real simulator: ignored
        talker.say("load_scene", scene_name="warren")
        talker.hear("car_loaded")


def test_a_loaded_simulator_goes_straight_to_the_car():
    with stand_in(scene="warren") as server, Talker(server) as talker:
        talker.hear("car_loaded")
        assert talker.control()["hit"] == "none"


def test_control_moves_and_reset_brings_back():
    with stand_in() as server, in_scene(server) as talker:
        start = talker.control()
        for _ in range(30):
            moved = talker.control(throttle=1.0)
        assert (
            moved["speed"] > 1
            and moved["vel_z"] == pytest.approx(moved["speed"])
            and moved["throttle"] > 0.99
            and moved["time"] == pytest.approx(31 * 0.05)
        )
        assert talker.control(steering=1.0)["steering_angle"] > 0
        stopped = [talker.control(brake=1.0) for _ in range(60)][-1]
        assert stopped["speed"] < 0.02
        talker.say("reset_car")
        back = talker.control(brake=1.0)
        assert math.hypot(back["pos_x"] - start["pos_x"], back["pos_z"] - start["pos_z"]) < 0.1 and back["speed"] == 0


def test_telemetry_has_every_field_and_an_image():
    with stand_in() as server, in_scene(server) as talker:
        frame = talker.control()
        for field in (
            "steering_angle",
            "throttle",
            "image",
            "hit",
            "time",
            "speed",
            "accel_x",
            "accel_y",
            "accel_z",
            "gyro_x",
            "gyro_y",
            "gyro_z",
            "pos_x",
            "pos_y",
            "pos_z",
            "vel_x",
            "vel_y",
            "vel_z",
            "pitch",
            "yaw",
            "roll",
            "cte",
            "activeNode",
            "totalNodes",
        ):
            assert field in frame
        assert decode_image(frame["image"]).shape == (120, 160, 3) and "lidar" not in frame


def test_configuration_messages():
    with stand_in() as server, in_scene(server) as talker:
        talker.say("car_config", body_style="donkey", body_r=1, body_g=2, body_b=3, car_name="me", font_size=100)
        talker.say("racer_info", racer_name="r", car_name="me", bio="b", country="c", guid="g")
        for encoding, magic in (("JPG", b"\xff\xd8"), ("PNG", b"\x89P"), ("TGA", b"\x00\x00\x02")):
            talker.say("cam_config", **CAMERA | {"img_w": 64, "img_h": 48, "img_enc": encoding})
            picture = talker.control()["image"]
            assert base64.b64decode(picture)[: len(magic)] == magic and decode_image(picture).shape == (48, 64, 3)
        talker.say("cam_config", **CAMERA | {"img_d": 1, "img_enc": "PNG"})
        assert decode_image(talker.control()["image"], 1).shape == (48, 64, 1)
        talker.say("cam_config_b", **CAMERA | {"img_w": 80, "img_h": 60})
        assert decode_image(talker.control()["image_b"]).shape == (60, 80, 3)
        talker.say("lidar_config", **LIDAR)
        beams = talker.control()["lidar"]
        assert {"rx", "ry", "d"} <= set(beams[0]) and min(abs(b["d"] - 10) for b in beams) < 1.5


def test_camera_settings_change_the_picture():
    with stand_in(world=WorldConfig(image_noise=0)) as server, in_scene(server) as talker:
        talker.say("cam_config", **CAMERA | {"img_enc": "PNG"})
        usual = decode_image(talker.control(brake=1.0)["image"]).astype(int)
        for change in ({"fov": 100}, {"offset_y": 4.0}, {"rot_x": 25.0}, {"fish_eye_x": 0.4, "fish_eye_y": 0.4}):
            talker.say("cam_config", **CAMERA | change)
            assert np.abs(decode_image(talker.control(brake=1.0)["image"]) - usual).mean() > 2, change
            talker.say("cam_config", **CAMERA | {"fov": 70, "offset_y": 2.2, "offset_z": 0.4, "rot_x": 13.0})
        usual_again = talker.control(brake=1.0)
        assert usual_again["msg_type"] == "telemetry"


def test_position_nodes_and_new_roads():
    with stand_in() as server, in_scene(server, "generated_road") as talker:
        first = talker.control()
        talker.say("node_position", index=40)
        node = talker.hear("node_position")
        talker.say("set_position", **{k: node[k] for k in ("pos_x", "pos_y", "pos_z", "Qx", "Qy", "Qz", "Qw")})
        there = talker.control()
        assert (
            abs(there["cte"]) < 0.1 and there["activeNode"] in (39, 40, 41) and there["pos_x"] == pytest.approx(node["pos_x"] / 8, abs=0.05)
        )
        talker.say("node_position", index=10**6)  # there is no such node: no answer
        talker.say("regen_road", road_style=0, rand_seed=11, turn_increment=0.0)
        assert talker.hear("need_car_config")
        talker.say("node_position", index=40)
        assert talker.hear("node_position")["pos_x"] != node["pos_x"] and talker.control()["totalNodes"] > 100
        assert first["activeNode"] < 20


def test_configuration_is_asked_for_when_it_does_not_come():
    with stand_in() as server, in_scene(server) as talker:
        for _ in range(25):
            talker.control()
        assert [m["msg_type"] for m in talker.heard].count("need_car_config") == 1


def test_laps_race_and_the_start_line():
    with stand_in(world=WorldConfig(race_laps=1, jitter=0.0)) as server, in_scene(server) as talker:
        track, said = named_track("waveshare"), []
        frame = talker.control()
        while "race_stop" not in said and len(said) < 2000:
            heading = track.heading[frame["activeNode"]]
            wrong = (math.radians(frame["yaw"]) - heading + math.pi) % (2 * math.pi) - math.pi
            frame = talker.control(
                steering=np.clip(
                    -0.3 * frame["cte"] - 1.8 * wrong + 5 * track.curvature[(frame["activeNode"] + 6) % len(track.points)], -1, 1
                ),
                throttle=0.3,
            )
            said += [m["msg_type"] for m in talker.heard]
            lap = next((m for m in talker.heard if m["msg_type"] == "cross_start"), None)
            talker.heard.clear()
            said.append("frame")
        events = [kind for kind in said if kind not in ("frame", "need_car_config")]
        assert events == ["race_start", "collision_with_starting_line", "collision_with_starting_line", "cross_start", "race_stop"]
        assert lap["lap_time"] == pytest.approx(track.length / 9, rel=0.15)


def test_wrong_way_round_disqualifies_and_a_distant_gate_is_missed():
    with stand_in(world=WorldConfig(jitter=0.0, gate=1.0, barrier=30)) as server, in_scene(server, "generated_track") as talker:
        talker.say("set_position", pos_x=-25.0, pos_y=0.0, pos_z=0.0, Qx=0, Qy=0, Qz=0, Qw=1)
        for _ in range(80):
            talker.control(throttle=0.4)
        assert "missed_checkpoint" in [m["msg_type"] for m in talker.heard]
    with stand_in(world=WorldConfig(jitter=0.0)) as server, in_scene(server) as talker:
        track, frame = named_track("waveshare"), None
        back = track.points[::-1]
        talker.say(
            "set_position",
            pos_x=back[0, 0],
            pos_y=0,
            pos_z=back[0, 1],
            Qx=0,
            Qy=math.sin((track.heading[-1] + math.pi) / 2),
            Qz=0,
            Qw=math.cos((track.heading[-1] + math.pi) / 2),
        )
        frame = talker.control()
        for _ in range(900):
            heading = track.heading[frame["activeNode"]] + math.pi
            wrong = (math.radians(frame["yaw"]) - heading + math.pi) % (2 * math.pi) - math.pi
            frame = talker.control(
                steering=np.clip(0.3 * frame["cte"] - 1.8 * wrong - 5 * track.curvature[frame["activeNode"] - 6], -1, 1), throttle=0.3
            )
            if "DQ" in [m["msg_type"] for m in talker.heard]:
                break
        assert "DQ" in [m["msg_type"] for m in talker.heard]


def test_the_barrier_is_a_hit():
    with stand_in() as server, in_scene(server) as talker:
        hits = [talker.control(steering=1.0, throttle=1.0)["hit"] for _ in range(80)]
        assert "barrier" in hits


def test_step_mode_and_ping():
    with stand_in(ping_after=0.2) as server, in_scene(server) as talker:
        assert talker.hear("ping")
        talker.control()
        talker.say("step_mode", step_mode="asynchronous", time_step=0.05)
        began = time.monotonic()
        for _ in range(10):
            talker.hear("telemetry")
        assert 0.3 < time.monotonic() - began < 3  # ten frames by the clock, unasked
        talker.say("step_mode", step_mode="synchronous", time_step=0.05)
        talker.say("get_protocol_version")
        assert talker.hear("protocol_version")["lockstep"] is True


def test_quit_app_ends_the_client_and_only_if_allowed_the_server():
    with stand_in() as server, Talker(server) as one, Talker(server) as two:
        one.say("quit_app")
        assert one.closed()
        two.say("get_scene_names")
        assert two.hear("scene_names")
    from rlnb.car.server import ServerConfig, SimulatorServer
    with SimulatorServer(ServerConfig(port=0, quit_app=True)) as server, Talker(server) as one:
        one.say("quit_app")
        server.thread.join(5)
        assert not server.thread.is_alive()


def conversation():
    "One of each message a client may send in a scene, as bytes."
    values = {
        "control": {"steering": 0.1, "throttle": 0.2, "brake": 0.0},
        "cam_config": CAMERA,
        "cam_config_b": CAMERA,
        "lidar_config": LIDAR,
        "load_scene": {"scene_name": "warren"},
        "car_config": {"body_style": "donkey", "body_r": 1, "body_g": 2, "body_b": 3, "car_name": 'a "b" {c} \\', "font_size": 9},
        "node_position": {"index": 3},
        "racer_info": {"racer_name": "é", "car_name": "}", "bio": "{", "country": "x", "guid": "1"},
        "set_position": {"pos_x": -18, "pos_y": 0, "pos_z": 3},
        "regen_road": {"road_style": 0, "rand_seed": 1, "turn_increment": 0},
        "step_mode": {"step_mode": "synchronous", "time_step": 0.05},
    }
    order = ["load_scene", *(m for m in CLIENT_MESSAGES if m not in ("load_scene", "quit_app", "exit_scene"))]
    return b"".join(encode(m, **values.get(m, {})) for m in order) + encode("control", **values["control"])


def answers(talker, count=2):
    kinds = []
    while kinds.count("telemetry") < count:
        data = talker.sock.recv(1 << 16)
        assert data
        kinds += [m["msg_type"] for m in talker.parser.feed(data)]
    return kinds


def test_packets_split_at_every_byte_and_merged_say_the_same():
    stream = conversation()
    with stand_in() as server:
        with Talker(server) as talker:
            talker.sock.sendall(stream)
            merged = answers(talker)
        with Talker(server) as talker:
            talker.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for i in range(len(stream)):
                talker.sock.sendall(stream[i : i + 1])
            split = answers(talker)
    assert split == merged and merged.count("telemetry") == 2 and merged[:2] == ["scene_selection_ready", "car_loaded"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_message_cut_in_two_waits_for_its_other_half(cut):
    with stand_in() as server, in_scene(server) as talker:
        whole = encode("control", steering=0.0, throttle=0.5, brake=0.0)
        talker.sock.sendall(whole[:cut])
        time.sleep(0.02)
        talker.sock.sendall(whole[cut:])
        assert talker.hear("telemetry")["time"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\xfe",
        b'{"msg_type":"control","steering":"a","throttle":"0","brake":"0"}',
        b'{"msg_type":"control","steering":"nan","throttle":"0","brake":"0"}',
        b'{"msg_type":"control"}',
        b'{"msg_type":"load_scene"}',
        b'{"msg_type":"load_scene","scene_name":["x"]}',
        b"{" * 100,
        b'{"msg_type":"x","y":"' + b"z" * (1 << 17),
        encode("cam_config", **CAMERA | {"img_w": 4000, "img_h": 4000}),
        encode("cam_config", **CAMERA | {"fov": 500}),
        encode("cam_config", **CAMERA | {"img_enc": "GIF"}),
        encode("lidar_config", **LIDAR | {"degPerSweepInc": 0.0}),
        encode("lidar_config", **LIDAR | {"degPerSweepInc": 0.1, "numSweepsLevels": 60}),
        encode("node_position", index="inf"),
        encode("step_mode", step_mode="sideways", time_step=1),
        encode("set_position", pos_x="1e300", pos_y=0, pos_z=0),
    ],
)
def test_a_client_that_breaks_the_rules_is_dropped_alone(bad):
    with stand_in() as server, in_scene(server) as good, in_scene(server) as villain:
        villain.sock.sendall(bad)
        assert villain.closed()
        assert good.control()["msg_type"] == "telemetry" and len(server.sessions) == 1


def test_an_unknown_message_is_ignored():
    with stand_in() as server, in_scene(server) as talker:
        talker.say("dance", how="wildly")
        assert talker.control()


def test_a_client_that_does_not_read_cannot_fill_the_memory():
    with stand_in(drop_after=1.0) as server, in_scene(server) as deaf:
        deaf.sock.settimeout(0.2)
        command = encode("control", steering=0, throttle=0, brake=0) * 50
        for _ in range(2000):
            try:
                deaf.sock.sendall(command)
            except OSError:
                break
        session = next(iter(server.sessions.values()))
        assert len(session.out) < 1 << 19 and len(session.inbox) < 2000
        assert len(session.parser.buffer) < 1 << 17
        deadline = time.monotonic() + 5
        while server.sessions and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server.sessions  # silent in effect: dropped


def test_second_client_when_there_is_room_for_one():
    with stand_in(max_clients=1) as server, in_scene(server) as first, Talker(server) as second:
        assert second.hear("server_full")["max_clients"] == 1
        assert second.closed() and first.control()


def test_a_silent_client_is_dropped():
    with stand_in(drop_after=0.3) as server, Talker(server) as silent:
        assert silent.closed() and not server.sessions


def test_same_seed_and_actions_same_bytes():
    def run(seed):
        with stand_in(world=WorldConfig(seed=seed)) as server, in_scene(server, "mini_monaco") as talker:
            return [json.dumps(talker.control(steering=0.3 * math.sin(i / 5), throttle=0.4)) for i in range(60)]
    assert run(3) == run(3) != run(4)


def test_every_message_of_the_protocol_was_spoken_above(request):
    if sum(item.path.name == "test_car_protocol.py" for item in request.session.items) < 40:
        pytest.skip("only meaningful after the whole file")
    assert set(CLIENT_MESSAGES) <= Talker.said and set(SERVER_MESSAGES) <= Talker.kinds
