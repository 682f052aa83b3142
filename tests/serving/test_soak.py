"""What the endurance test counts as a fault."""

import argparse
import asyncio
import random
import socket
import struct
from collections import Counter

import pytest
import torch

from benchmarks import serving_soak
from benchmarks.server_process import open_client
from benchmarks.serving_clients import Clients, Reference, Tally, with_first_cause

MIB = 2**20
# Tokens 1 and 2 are equal at the second place; at every other place token 1 is greedy.
GAPS_LV = torch.tensor([[5.0, 0.0, 5.0], [5.0, 0.0, 1e-6], [5.0, 0.0, 5.0], [5.0, 0.0, 5.0]])


@pytest.mark.parametrize(
    ("ours", "theirs", "tie"),
    [
        ([1, 2, 1], [1, 1, 1], True),
        ([1, 1, 1], [1, 2, 0], True),
        ([1, 1, 1], [1, 0, 1], False),
        ([1, 0, 1], [1, 1, 1], False),
        ([1, 2, 0], [1, 1, 1], False),
        ([1, 1], [1, 1, 1], False),
        ([1, 1, 1], [1, 1], False),
        ([], [1], False),
    ],
    ids=["ours", "theirs", "theirs is not greedy", "ours is not greedy", "later", "short", "long", "empty"],
)
def test_answers_may_part_at_ties_only(monkeypatch, ours, theirs, tie):
    monkeypatch.setattr(serving_soak, "greedy_gaps", lambda base, prompt, answer: GAPS_LV[: len(answer)])
    monkeypatch.setattr(serving_soak, "load_base", lambda *_: None)
    different = [{"prompt": [0], "ours": ours, "theirs": theirs}]
    assert serving_soak.is_near_tie(None, [0], ours, theirs) is tie
    assert serving_soak.near_ties("base", different) == tie


@pytest.mark.parametrize(
    ("samples", "fault", "printed"),
    [
        ([50, 100, 100, 100], 0, "50.0, 100.0, 100.0, 100.0"),
        ([100, 100, 104, 104], 0, "104.0"),
        ([100, 100, 103, 106], 1, "above 1.05 times the second"),
        ([100, 100, 100], 1, "3 samples are too few"),
    ],
    ids=["start", "little", "growth", "few"],
)
def test_memory_must_not_grow(capsys, samples, fault, printed):
    assert (
        serving_soak.memory_faults([MIB * sample for sample in samples for _ in range(len(samples) // 4 or 1)]) == fault
    )
    assert printed in capsys.readouterr().out


def test_a_watch_that_fails_ends_the_soak(monkeypatch, tmp_path):
    async def endless(*_):
        await asyncio.sleep(60)

    def unreadable(session):
        raise RuntimeError("no such process")

    monkeypatch.setattr(serving_soak, "soak", endless)
    monkeypatch.setattr(serving_soak, "resident_bytes", unreadable)
    options = argparse.Namespace(memory=tmp_path / "memory.csv", requests=1, seed=0)
    server = argparse.Namespace(process=argparse.Namespace(pid=1))

    async def limited():
        await asyncio.wait_for(serving_soak.watched_soak(options, {}, Tally(), server), 20)

    with pytest.raises(RuntimeError, match="no such process"):
        asyncio.run(limited())


def test_a_watch_ends_with_the_soak(monkeypatch, tmp_path):
    async def sent(options, known, count, tally, *_):
        await asyncio.sleep(0.05)
        tally.kinds = Counter(whole=count)

    monkeypatch.setattr(serving_soak, "soak", sent)
    monkeypatch.setattr(serving_soak, "resident_bytes", lambda session: 7)
    monkeypatch.setattr(serving_soak, "MEMORY_SECONDS", 0.01)
    options = argparse.Namespace(memory=tmp_path / "memory.csv", requests=3, seed=0)
    server, tally = argparse.Namespace(process=argparse.Namespace(pid=1)), Tally()
    assert set(asyncio.run(serving_soak.watched_soak(options, {}, tally, server))) == {7}
    assert tally.kinds["whole"] == 3


def test_a_problem_names_its_first_cause():
    async def reset(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def asked():
        server, tally = await asyncio.start_server(reset, "127.0.0.1", 0), Tally()
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, open_client(url, 20.0) as client:
            clients = Clients(argparse.Namespace(model="tiny"), client, tally)
            await clients.request("a", Reference([0], [1], "a"), random.Random(0))
        return tally.problems

    (problem,) = asyncio.run(asked())
    assert "ReadError" in problem
    assert "caused by ConnectionResetError" in problem
    assert with_first_cause(ValueError("alone")) == "ValueError('alone')"


DIFFERENT = {"prompt": [0], "ours": [1], "theirs": [1, 1]}


@pytest.mark.parametrize(
    ("soaked", "while_killed", "again", "count"),
    [
        (Tally(), Tally(problems=["reset"]), Tally(), 0),
        (Tally(), Tally(), Tally(), 1),
        (Tally(), Tally(problems=["reset"], different=[DIFFERENT]), Tally(), 1),
        (Tally(problems=["p"], different=[DIFFERENT]), Tally(problems=["reset"]), Tally(), 2),
        (Tally(), Tally(problems=["reset"]), Tally(problems=["p"], different=[DIFFERENT]), 2),
    ],
    ids=["none", "not killed", "while killed", "soak", "restart"],
)
def test_faults_of_every_part_count(soaked, while_killed, again, count):
    assert serving_soak.faults(soaked, while_killed, again, [MIB] * 8, None) == count
    assert serving_soak.faults(soaked, while_killed, again, [MIB] * 4 + [2 * MIB] * 4, None) == count + 1


def test_memory_is_drawn_over_the_requests(tmp_path):
    file = tmp_path / "memory.csv"
    file.write_text("seconds,requests,bytes\n0,0,1073741824\n5,100,2147483648\n")
    serving_soak.draw_memory(file)
    drawn = (tmp_path / "memory.svg").read_text()
    assert 'points="60.0,164.0 500.0,54.0"' in drawn  # half the height at the left, all of it at the right
