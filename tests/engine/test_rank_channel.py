"""The sockets between the engine's process and a rank, and how either waits."""

import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kllm.engine import rank_channel
from kllm.engine.rank_channel import (
    BUSY_S,
    HEARTBEAT,
    STEPS,
    Address,
    Channel,
    SpinWait,
    address_of,
    allow_descriptors,
    call,
    identify,
    listen,
    local_address,
    new_key,
    parse_address,
)
from kllm.errors import CapacityError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 5_000_000])
def test_messages_of_any_size_arrive_whole(
    ends: tuple[socket.socket, socket.socket], size: int
) -> None:
    ours, theirs = map(Channel, ends)
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    def echo() -> None:
        for _ in range(2):
            theirs.send(bytes(theirs.receive()))

    thread = threading.Thread(target=echo)
    thread.start()
    for _ in range(2):
        ours.send(data)
        assert ours.receive() == data
    thread.join()


def test_a_length_that_comes_in_pieces_is_put_together(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    raw, theirs = ends[0], Channel(ends[1])
    thread = threading.Thread(target=lambda: raw.sendall((3).to_bytes(8, "big")[4:] + b"abc"))
    raw.sendall((3).to_bytes(8, "big")[:4])
    thread.start()
    assert theirs.receive() == b"abc"
    thread.join()


def test_the_end_of_the_other_side_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"\0\0")
    ends[0].close()
    with pytest.raises(EOFError):
        Channel(ends[1]).receive()


def test_sending_to_nobody_who_reads_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        Channel(ends[0]).send(bytes(1 << 24))


def test_only_those_who_know_the_key_are_let_in() -> None:
    key = new_key()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(shown: str, line: int) -> Any:
            with call(listener.getsockname()[:2], shown, 7, line):
                caller, _ = listener.accept()
                with caller:
                    return identify(caller, key)

        assert answer(key, STEPS) == (7, STEPS)
        assert answer(key, HEARTBEAT) == (7, HEARTBEAT)
        assert answer(new_key(), STEPS) is None
        with socket.create_connection(listener.getsockname()[:2]) as stranger:
            caller, _ = listener.accept()
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            stranger.shutdown(socket.SHUT_WR)
            with caller:
                assert identify(caller, key) is None


@pytest.mark.parametrize("address", [local_address(), ("127.0.0.1", 0)], ids=["local", "tcp"])
def test_a_rank_finds_what_its_command_line_names(address: Address) -> None:
    key = new_key()
    with (
        listen(address, backlog=1) as listener,
        call(parse_address(address_of(listener)), key, 7, STEPS),
    ):
        caller, _ = listener.accept()
        with caller:
            assert identify(caller, key) == (7, STEPS)


def test_a_caller_that_says_little_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that says nothing nor one that always says a little more."""
    monkeypatch.setattr(rank_channel, "LOOK_S", 0.1)
    for said in (b"", b"x"):
        ours, theirs = socket.socketpair()
        done = threading.Event()

        def drip(line: socket.socket = theirs, said: bytes = said, over: Any = done) -> None:
            while not over.wait(0.02):
                line.sendall(said)

        with ours, theirs:
            thread = threading.Thread(target=drip)
            thread.start()
            begin = time.monotonic()
            assert identify(ours, new_key()) is None
            assert time.monotonic() - begin < 0.5
            done.set()
            thread.join()


class Poll:
    """An answer that comes after some time, which passes while it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ready_s = 100.0, 0.0
        self.lost_s = 0.0  # to others, whenever the process lets them run
        self.asleep = 0
        monkeypatch.setattr(rank_channel.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(rank_channel.os, "sched_yield", self.let_others_run)

    def let_others_run(self) -> None:
        self.now += self.lost_s

    def poll(self, milliseconds: int | None) -> list[tuple[int, int]]:
        if milliseconds == 0:
            self.now += 1e-5
        else:
            self.asleep += 1
            self.now = max(self.now, self.ready_s)
        return [(3, select.POLLIN)] if self.now >= self.ready_s else []

    def wait(self, spin_wait: SpinWait, seconds: float) -> bool:
        """Whether the process slept until an answer after so many seconds."""
        self.ready_s, self.asleep = self.now + seconds, 0
        assert spin_wait.wait(self, None) == [(3, select.POLLIN)]  # type: ignore[arg-type]
        return self.asleep > 0


def machine(monkeypatch: pytest.MonkeyPatch, cores: float, load: float = 0.0) -> None:
    monkeypatch.setattr(rank_channel, "usable_cores", lambda: cores)
    monkeypatch.setattr(rank_channel.os, "getloadavg", lambda: (load, load, load))


def test_a_near_answer_is_waited_for_busily(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=4)
    poll, spin_wait = Poll(monkeypatch), SpinWait(3)
    assert not poll.wait(spin_wait, BUSY_S / 2)
    assert poll.wait(spin_wait, 10 * BUSY_S), "no longer than that"
    assert poll.wait(spin_wait, BUSY_S / 2), "the last one was not near"
    assert not poll.wait(spin_wait, BUSY_S / 2)


@pytest.mark.parametrize(("cores", "load"), [(3, 0.0), (2.5, 0.0), (4, 4.0)])
def test_nobody_waits_busily_where_all_cores_are_taken(
    monkeypatch: pytest.MonkeyPatch, cores: float, load: float
) -> None:
    machine(monkeypatch, cores, load)
    poll, spin_wait = Poll(monkeypatch), SpinWait(3)
    assert all(poll.wait(spin_wait, BUSY_S / 2) for _ in range(3))


def test_the_load_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=4, load=9.0)
    poll, spin_wait = Poll(monkeypatch), SpinWait(3)
    assert poll.wait(spin_wait, BUSY_S / 2)
    machine(monkeypatch, cores=4)
    assert poll.wait(spin_wait, BUSY_S / 2)
    poll.now += 2 * rank_channel.LOOK_S
    assert not poll.wait(spin_wait, BUSY_S / 2)


def test_a_core_that_pauses_once_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=4)
    poll, spin_wait = Poll(monkeypatch), SpinWait(3)
    poll.lost_s = BUSY_S / 2
    assert not poll.wait(spin_wait, BUSY_S / 4)
    poll.lost_s = 0.0
    assert not poll.wait(spin_wait, BUSY_S / 2)


def test_a_core_that_others_want_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=4)
    poll, spin_wait = Poll(monkeypatch), SpinWait(3)
    poll.lost_s = 2 * rank_channel.TAKEN_S
    asleep = [poll.wait(spin_wait, BUSY_S / 2) for _ in range(10)]
    assert not asleep[0], "now and then is nothing"
    assert asleep[-1]
    poll.lost_s = 0.0
    assert poll.wait(spin_wait, BUSY_S / 2)
    poll.now += 2 * rank_channel.LOOK_S
    assert not poll.wait(spin_wait, BUSY_S / 2)


def test_more_open_files_are_allowed_as_far_as_the_system_lets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_descriptors(100)
    assert raised == []
    allow_descriptors(150)
    assert raised == [(150, 200)]
    with pytest.raises(CapacityError, match="needs about 201 open files and sockets and 200 are"):
        allow_descriptors(201)
