"""Virtual machines with an RDMA device in software, for hosts that have none: `make rdma-check`.

QEMU boots Debian's kernel, whose module rdma_rxe speaks RDMA over Ethernet (RoCE), and runs a command in the host's
own file system, which it sees read-only. It shows correctness, never speed: by default QEMU translates instructions,
ten to fifty times slower than the host. Nothing is installed on the host: packages are extracted into a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gear_loader.errors import TransportError
from gear_loader.transport.ucx_links import link_ucx

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".rdma"  # packages, the kernel and what the machines write
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PACKAGES = [
    *("linux-image-amd64", "qemu-system-x86", "busybox-static", "kmod", "iproute2"),
    *("rdma-core", "libibverbs1", "ibverbs-providers", "librdmacm1", "ibverbs-utils"),
]
# In the order in which they are loaded; each brings what it depends on.
MODULES = [
    *("virtio_pci", "9pnet_virtio", "9p", "virtio_net", "dummy"),
    *("crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe"),
]
SECONDS = 3000.0  # a run of the machines may take

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /host
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(cat /modules.list); do insmod /modules/$module || echo "no module $module"; done
options=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o ro,cache=loose,$options host /host || poweroff -f
# A /tmp that can be written, with this repository still there if that is where it lies.
mkdir /kept; mount --bind /host@ROOT@ /kept; mount -t tmpfs -o size=25% tmp /host/tmp
mkdir -p /host@ROOT@; mount --bind /kept /host@ROOT@
mount -t 9p -o cache=mmap,$options work /host@FOLDER@ || poweroff -f
mkdir -p /dev/shm /dev/pts; mount --rbind /dev /host/dev; mount --rbind /proc /host/proc; mount --rbind /sys /host/sys
mount -t devpts devpts /host/dev/pts; mount -t tmpfs -o size=75% shm /host/dev/shm
chroot /host /bin/sh @WORK@/guest@NUMBER@.sh
echo $? > /host@WORK@/status@NUMBER@
sync
poweroff -f
"""

GUEST = """# What runs in machine @NUMBER@, as root of the host's file system.
root=@PACKAGES@
export PATH=@VENV@/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
PATH=$PATH:$root/usr/sbin:$root/usr/bin:$root/sbin:$root/bin
export @UCX@
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$root/@LIBRARIES@:$root/lib/x86_64-linux-gnu
ip link set lo up
ip link add eth0 type dummy 2>/dev/null
ip addr add 10.9.0.@HOST@/24 dev eth0; ip link set eth0 up
rdma link add rxe0 type rxe netdev eth0 || exit 99
# A wheel's libibverbs brings the providers of a few vendors and looks for no others.
system=$(ls $root/@LIBRARIES@/libibverbs.so.1.* | head -1)
for theirs in @VENV@/lib/python3*/site-packages/nixl*.libs/libibverbs*.so*; do mount --bind $system $theirs; done
export RDMAV_DRIVERS=$root/@LIBRARIES@/libibverbs/librxe
# rdma_rxe fails a datagram queue pair that sends while its device is down, on which UCX ends the process; so nothing is
# sent to keep connections alive.
export UCX_KEEPALIVE_INTERVAL=inf
export UCX_TLS=rc_verbs,ud_verbs,self UCX_NET_DEVICES=rxe0:1 UCX_WARN_UNUSED_ENV_VARS=n UCX_LOG_LEVEL=error
export TMPDIR=/dev/shm HOME=/dev/shm HYPOTHESIS_STORAGE_DIRECTORY=/dev/shm/hypothesis
export GEAR_LOADER_SLOWER=8 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES= NUMBA_CACHE_DIR=@FOLDER@/numba MACHINE=@NUMBER@ MACHINES=@MACHINES@
ulimit -l unlimited
cd @ROOT@
@COMMAND@
"""


PYTEST = "python -m pytest -p no:cacheprovider -q -s -m 'not long' --timeout 900 --color no"
CHECKS = {
    1: f"{PYTEST} tests/rdma/test_verbs.py tests/transport/test_transport_nixl.py "
    "tests/transport/test_transport_ucx.py",
    2: f"{PYTEST} tests/rdma/test_two_machines.py",
}


def main() -> int:
    """Run the checks, or a command, in one machine and in two; returns the worst of their exit statuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--machines", type=int, choices=(1, 2), help="one, or two with a network; default: both"
    )
    parser.add_argument("--memory", type=int, default=3072, help="MiB of each")
    parser.add_argument("--timeout", type=float, default=SECONDS, help="seconds until they are ended")
    parser.add_argument(
        "command", nargs="?", help="for a shell in each; $MACHINE is 0 or 1; default: the checks"
    )
    given = parser.parse_args()
    try:
        folder = packages()
        return max(
            run(folder, given.command or CHECKS[machines], machines, given.memory, given.timeout)
            for machines in ([given.machines] if given.machines else CHECKS)
        )
    except (MissingError, TransportError) as error:
        print(f"rdma-check cannot run here: {error}", file=sys.stderr)
        return 2


class MissingError(Exception):
    """Something that the machines need is not on this host."""


def packages() -> Path:
    """Download and extract what the host lacks; returns the folder."""
    folder = FOLDER / "packages"
    if (folder / "complete").exists():
        return folder
    if platform.machine() != "x86_64" or shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise MissingError(
            "it takes a kernel with rdma_rxe from Debian's packages for x86_64. Where the host has the module, root "
            "can do without: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0; then run pytest tests/rdma."
        )
    shutil.rmtree(folder, ignore_errors=True)
    archives = folder / "archives"
    archives.mkdir(parents=True)
    simulated = _output("apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES)
    needed = {line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")}
    print(f"Downloading {len(needed)} packages into {folder} ...", flush=True)
    _output("apt-get", "download", "-q", *sorted(needed | set(PACKAGES)), folder=archives)
    for archive in sorted(archives.glob("*.deb")):
        _output("dpkg", "-x", str(archive), str(folder))
    shutil.rmtree(archives)
    (folder / "complete").touch()
    return folder


def _output(*command: str, folder: Path | None = None, executable: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, executable=executable, capture_output=True, text=True)
    if done.returncode:
        raise MissingError(f"{shlex.join(command)[:200]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def initial_ram_disk(folder: Path, release: str, work: Path, number: int) -> Path:
    """Busybox, the modules and the script that the kernel starts; returns the file."""
    modules = folder / "lib/modules" / release
    if not (modules / "modules.dep").exists():
        _output("depmod", "-b", str(folder), release, executable=folder / "bin/kmod")
    listed = [line.split(":") for line in (modules / "modules.dep").read_text().splitlines()]
    needs = {Path(name).stem: [*reversed(others.split()), name] for name, others in listed}
    disk = work / f"disk{number}"
    (disk / "bin").mkdir(parents=True)
    (disk / "modules").mkdir()
    shutil.copy(folder / "bin/busybox", disk / "bin/busybox")
    wanted = dict.fromkeys(each for name in MODULES for each in needs[name])
    for each in wanted:
        shutil.copy(modules / each, disk / "modules")
    (disk / "modules.list").write_text("\n".join(Path(each).name for each in wanted))
    init = disk / "init"
    init.write_text(_filled(INIT, WORK=work, FOLDER=FOLDER, ROOT=ROOT, NUMBER=number))
    init.chmod(0o755)
    image = work / f"initrd{number}"
    with image.open("wb") as out:
        names = "\n".join(str(path.relative_to(disk)) for path in sorted(disk.rglob("*")))
        busybox = [str(folder / "bin/busybox"), "cpio", "-o", "-H", "newc"]
        subprocess.run(
            busybox, cwd=disk, input=names.encode(), stdout=out, stderr=subprocess.DEVNULL, check=True
        )
    return image


def _filled(script: str, **values: object) -> str:
    for name, value in values.items():
        script = script.replace(f"@{name}@", str(value))
    return script


def start(
    folder: Path, work: Path, command: str, number: int, machines: int, memory: int
) -> subprocess.Popen[bytes]:
    """Start machine `number`, which runs the command and ends."""
    values = {"PACKAGES": folder, "LIBRARIES": LIBRARIES, "VENV": sys.prefix, "ROOT": ROOT, "FOLDER": FOLDER}
    variables = link_ucx(FOLDER / "ucx") | {"LD_LIBRARY_PATH": str(FOLDER / "ucx")}
    ucx = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    script = _filled(
        GUEST, **values, UCX=ucx, NUMBER=number, MACHINES=machines, HOST=number + 1, COMMAND=command
    )
    (work / f"guest{number}.sh").write_text(script)
    kernel = sorted((folder / "boot").glob("vmlinuz-*"))[-1]
    disk = initial_ram_disk(folder, kernel.name.partition("-")[2], work, number)
    network = ["-nic", "none"]
    if machines > 1:
        end = f"server={'on' if number == 0 else 'off'},addr.type=unix,addr.path={work}/cable"
        card = f"virtio-net-pci,netdev=cable,mac=52:54:00:09:00:0{number + 1}"
        network = ["-netdev", f"stream,id=cable,{end}", "-device", card]
    share = "security_model=none,multidevs=remap"
    libraries = ":".join(str(folder / each) for each in (LIBRARIES, "lib/x86_64-linux-gnu"))
    return subprocess.Popen(
        [
            str(folder / "usr/bin/qemu-system-x86_64"),
            *("-L", str(folder / "usr/share/qemu"), "-L", str(folder / "usr/share/seabios")),
            *(
                "-accel",
                os.environ.get("RDMA_CHECK_ACCEL", "tcg,thread=multi"),
                "-cpu",  # QEMU 7.2 translates AVX2 wrongly: numpy then sorts wrongly
                os.environ.get("RDMA_CHECK_CPU", "max,-avx2"),
            ),
            *("-m", str(memory), "-smp", "2", "-nographic", "-no-reboot", *network),
            *("-kernel", str(kernel), "-initrd", str(disk)),
            *("-append", "console=ttyS0 rdinit=/init panic=-1 quiet net.ifnames=0"),
            *("-virtfs", f"local,path=/,mount_tag=host,readonly=on,{share}"),
            *("-virtfs", f"local,path={FOLDER},mount_tag=work,{share}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=(work / "output1").open("wb") if number else None,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
    )


def compile_for_any_processor() -> None:
    """Compile the CPU path's loops here, for a processor that the machines have too: there it takes minutes."""
    cache = FOLDER / "numba"
    cache.mkdir(exist_ok=True)
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-m", "gear_loader", "warmup"], env={**os.environ, **generic}, check=True)


def run(folder: Path, command: str, machines: int, memory: int, timeout: float) -> int:
    """Run the command in each machine at once; the first one's output is shown."""
    work = FOLDER / "work"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(work)
    work.mkdir(parents=True)
    compile_for_any_processor()
    began = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(machines):
            running.append(start(folder, work, command, number, machines, memory))
            while machines > 1 and number == 0 and not (work / "cable").exists():
                time.sleep(0.05)
        for each in running:
            each.wait(max(0.0, timeout - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        print(f"\nThe machines did not end within {timeout:g} s.", file=sys.stderr)
    finally:
        for each in running:
            each.kill()
    return max(status for status in _statuses(work, machines))


def _statuses(work: Path, machines: int) -> Iterator[int]:
    for number in range(machines):
        file = work / f"status{number}"
        yield int(file.read_text()) if file.exists() else 1


if __name__ == "__main__":
    sys.exit(main())
