"""Builds hosts with slow links from this machine's kernel alone: network namespaces, a bridge, `tc tbf`.

    host 0: eth0 10.77.0.1 ----- port0 \\
    host 1: eth0 10.77.0.2 ----- port1 -- bridge        every line is a veth pair,
    ...                                /  (the switch)  every --- end shapes what it sends

A host is a network namespace whose one interface, eth0, leads to a port of the switch, a bridge in a
namespace of its own. `shape` puts a token bucket on eth0 (what the host sends) and one on its port (what it
receives): a full-duplex link of that rate. What ranks of one host send each other to eth0's own address
stays on the namespace's loopback, as the kernel routes it, and is not shaped.

**No namespace has a name.** Each exists as long as a file descriptor or a process holds it. So the kernel
removes everything with the last process, however that ends: nothing can remain, and the machine's own
interfaces, addresses and firewall rules are never touched. (`ip netns add` would leave a mount if the command
was killed.) To look into a running one: `nsenter --net --target PID ss -ti`.

The token bucket: segmentation offload gives tbf packets of up to 64 KiB, and a packet larger than the burst
would be split or dropped. An idle link lets a burst through at once, so that the burst is as small as these
packets allow, or 1 ms of the rate if that is more, since a late timer must not waste tokens. The queue is
long (QUEUE_BYTES), so that nothing is lost in it. Still it must not fill up, because acknowledgements wait in
it behind data, and late streams behind early ones. So every host's TCP has little in its own queue
(tcp_limit_output_bytes) and in flight (tcp_rmem), as on a link with a queue of that size.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from megatron_patch.errors import UserError

INTERFACE = "eth0"
QUEUE_BYTES = 64 << 20
_SMALLEST_BURST = 70_000
"""The bytes of a packet of 64 KiB with the headers that tbf counts for its segments."""
_TCP = {
    "tcp_limit_output_bytes": "131072",
    "tcp_rmem": "4096 131072 131072",
    "tcp_slow_start_after_idle": "0",
}
_CLONE_NEWNET = 0x40000000
_WAY_OUT = "run it as root, in a container with --privileged (or --cap-add NET_ADMIN,SYS_ADMIN)"


def address(host: int) -> str:
    """Return the address of a host's interface."""
    return f"10.77.0.{host + 1}"


def burst_bytes(rate_mbit: float) -> int:
    """Return how many bytes a link lets through at once after it was idle."""
    return max(_SMALLEST_BURST, int(rate_mbit * 1e6 / 8 * 0.001))


def shape_command(interface: str, rate_mbit: float | None) -> str:
    """Return the line for `tc -batch` that sets an interface's rate; None removes the limit."""
    if rate_mbit is None:
        return f"qdisc replace dev {interface} root pfifo_fast"
    return (
        f"qdisc replace dev {interface} root tbf rate {round(rate_mbit * 1000)}kbit "
        f"burst {burst_bytes(rate_mbit)} limit {QUEUE_BYTES}"
    )


class Namespace:
    """A network namespace without a name, kept by a file descriptor until `close`."""

    def __init__(self) -> None:
        self.fd = _new_namespace()

    @property
    def path(self) -> str:
        """The path by which other processes of this machine find it, for `ip link add ... netns`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, this thread and every process that it starts are in the namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.setns(self.fd, _CLONE_NEWNET)
            yield
        finally:
            os.setns(before, _CLONE_NEWNET)
            os.close(before)

    def run(self, program: str, lines: Sequence[str]) -> None:
        """Run `ip` or `tc` in this namespace with these lines as a batch.

        Raises:
            UserError: the program refused a line; the error has its message.
        """
        with self.entered():
            done = subprocess.run(
                [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
            )
        if done.returncode:
            words = " ".join(done.stderr.split())
            raise UserError(f"bench network: `{program}` failed: {words}; {_WAY_OUT}")

    def tune(self, settings: dict[str, str]) -> None:
        """Set the namespace's TCP settings, below net.ipv4; those that this kernel lacks are skipped."""
        with self.entered():
            for name, value in settings.items():
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _new_namespace() -> int:
    """Create a namespace in a thread that ends, and return a descriptor of the namespace."""
    found: list[int | OSError] = []

    def leave() -> None:
        try:
            os.unshare(_CLONE_NEWNET)
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, OSError):
        raise UserError(f"bench network: cannot make a network namespace: {result.strerror}; {_WAY_OUT}")
    return result


def check() -> None:
    """Check that this machine can create the network.

    Raises:
        UserError: it cannot; the message names what is missing, and what to do.
    """
    if not hasattr(os, "setns"):
        raise UserError("bench network: needs Linux network namespaces; run it on Linux")
    if os.geteuid() != 0:
        raise UserError(f"bench network: needs root, to make network namespaces and set rates; {_WAY_OUT}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UserError(
                f"bench network: needs `{program}`, which is not installed; install iproute2 "
                "(apt-get install iproute2, dnf install iproute iproute-tc)"
            )
    os.close(_new_namespace())


class Network:
    """Some hosts at one switch, which exist while the block runs; links have no limit until `shape`."""

    def __init__(self, hosts: int) -> None:
        self.hosts: list[Namespace] = []
        self.switch: Namespace | None = None
        self._count = hosts

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        self.switch = Namespace()
        self.hosts = [Namespace() for _ in range(self._count)]
        self.switch.run("ip", ["link add bridge0 type bridge", "link set bridge0 up"])
        for number, host in enumerate(self.hosts):
            lines = [
                f"link add port{number} type veth peer name {INTERFACE} netns {host.path}",
                f"link set port{number} master bridge0",
                f"link set port{number} up",
            ]
            self.switch.run("ip", lines)
            lines = ["link set lo up", f"addr add {address(number)}/24 dev {INTERFACE}"]
            host.run("ip", [*lines, f"link set {INTERFACE} up"])
            host.tune(_TCP)

    def shape(self, rate_mbit: float | None) -> None:
        """Set the rate of every host's link in both directions; None removes the limit."""
        assert self.switch is not None
        for host in self.hosts:
            host.run("tc", [shape_command(INTERFACE, rate_mbit)])
        ports = [shape_command(f"port{number}", rate_mbit) for number in range(len(self.hosts))]
        self.switch.run("tc", ports)

    def cut(self, number: int) -> None:
        """Disconnect a host at the switch, so that packets are lost as when a cable breaks."""
        assert self.switch is not None
        self.switch.run("ip", [f"link set port{number} down"])

    def close(self) -> None:
        for namespace in [*self.hosts, *([self.switch] if self.switch else [])]:
            namespace.close()
        self.hosts, self.switch = [], None
