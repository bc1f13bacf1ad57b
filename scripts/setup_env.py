"""Make the virtual environment ``.venv`` with pinned packages, once.

    python3 scripts/setup_env.py [run | dev | types]

``run`` is what the engine needs, ``dev`` adds tests and linters, ``types`` the type
checker. A second call returns at once while the requirement files are unchanged.
PyTorch is not pinned with the rest: where the Python found has a new enough one, the
environment uses that, whatever accelerator it was built for; elsewhere one is
installed. The same holds for triton, where that torch brings it. Nothing outside the
checkout is written.

Only the standard library is used, in a form that an older Python 3 can still
run, to say that it is too old.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
TORCH_PIN = "torch==2.13.0"
TORCH_OLDEST = (2, 11)
PYTHONS = ((3, 11), (3, 12))

#: Requirement files that each level adds to those before it.
LEVELS = {
    "run": ("run.txt",),
    "dev": ("dev.txt", "triton.txt", "oracles.txt"),
    "types": ("types.txt",),
}
#: Megabytes that each file's packages take as downloads (Linux x86-64).
SIZES_MB = {
    "run.txt": 54,
    "dev.txt": 47,
    "triton.txt": 188,
    "oracles.txt": 1,
    "types.txt": 65,
}
TORCH_SIZE = (
    "about 190 MB as a build for the CPU alone, or several GB as a build with CUDA "
    "libraries, whichever the package index gives this platform by default (the "
    "variables PIP_INDEX_URL and PIP_EXTRA_INDEX_URL choose another index)"
)

#: What the build of mamba-ssm reads: compile no kernels, fetch none that are compiled.
PURE_PYTHON = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "MAMBA_FORCE_BUILD": "TRUE"}

#: Run by a candidate interpreter: its version, its torch if it has one, and whether a
#: triton came with that, as it does with builds for an accelerator.
PROBE = """
import importlib.util, json, pathlib, sys
found = {"python": list(sys.version_info[:2]), "torch": None, "folder": None}
found["triton"] = False
try:
    import torch
    found["torch"] = torch.__version__
    found["folder"] = str(pathlib.Path(torch.__file__).parents[1])
    kinds = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    found["triton"] = any(kinds) and importlib.util.find_spec("triton") is not None
except Exception:
    pass
print(json.dumps(found))
"""


def probe(python):
    """Ask an interpreter for its version and its torch; None if it does not run."""
    try:
        answer = subprocess.run(
            [str(python), "-c", PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(answer.stdout.decode().splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def has_torch(found):
    """Tell whether a probed interpreter imports a torch that is new enough."""
    if not found or not found["torch"]:
        return False
    major, minor = found["torch"].split(".")[:2]
    return (int(major), int(minor)) >= TORCH_OLDEST


def find_python():
    """Pick the interpreter that the environment is built on, with what it has."""
    named = os.environ.get("PYTHON")
    for name in [named] if named else ["python3", "python3.12", "python3.11"]:
        path = shutil.which(name)
        found = probe(path) if path else None
        if path and found and tuple(found["python"]) in PYTHONS:
            return path, found
    wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    tried = named or "python3, python3.12 and python3.11"
    sys.exit(f"Python {wanted} is needed; tried {tried}. Name one with PYTHON=...")


def venv_python():
    """Return the path of the environment's own interpreter."""
    return VENV / ("Scripts" if os.name == "nt" else "bin") / "python"


def is_usable():
    """Tell whether the environment exists, runs, and has its installer."""
    found = probe(venv_python())
    if not found or tuple(found["python"]) not in PYTHONS:
        return False
    asked = [str(venv_python()), "-c", "import pip"]
    return subprocess.run(asked, stderr=subprocess.DEVNULL).returncode == 0


def create():
    """Create the environment, with sight of a torch that the machine already has."""
    python, found = find_python()
    reuse = has_torch(found)
    options = ["--system-site-packages"] if reuse else []
    major, minor = found["python"]
    print(f"Creating .venv with Python {major}.{minor}", flush=True)
    made = subprocess.run([python, "-m", "venv", "--clear", *options, str(VENV)])
    if made.returncode:
        sys.exit("No virtual environment: on Debian and Ubuntu, install python3-venv.")
    if reuse and not has_torch(probe(venv_python())):
        # That Python is itself a virtual environment, which a child does not inherit.
        site = subprocess.check_output(
            [
                str(venv_python()),
                "-c",
                "import sysconfig; print(sysconfig.get_path('purelib'))",
            ]
        )
        link = Path(site.decode().strip()) / "torch_of_the_parent.pth"
        link.write_text(found["folder"] + "\n", encoding="utf-8")


def levels_up_to(level):
    """List a level and those that it builds on, in order."""
    names = list(LEVELS)
    return names[: names.index(level) + 1]


def digest(level):
    """Hash what a level is made from."""
    taken = hashlib.sha256(TORCH_PIN.encode())
    for below in levels_up_to(level):
        for name in LEVELS[below]:
            taken.update((ROOT / "requirements" / name).read_bytes())
    return taken.hexdigest()


def stamp(level):
    """Return the path of the file that says a level is complete."""
    return VENV / f"setup-{level}.sha256"


def is_complete(level):
    """Tell whether a level was installed from the requirement files as they are."""
    mark = stamp(level)
    if not (venv_python().exists() and mark.is_file()):
        return False
    return mark.read_text(encoding="utf-8") == digest(level)


def install(level):
    """Install a level's packages, and torch where there is none."""
    levels = levels_up_to(level)
    missing = [
        name for part in levels if not is_complete(part) for name in LEVELS[part]
    ]
    size = sum(SIZES_MB[name] for name in missing)
    present = probe(venv_python())
    packages = []
    print(f"Installing pinned packages: up to {size} MB to download.", flush=True)
    if present and has_torch(present):
        print(f"Using torch {present['torch']}, already there.", flush=True)
    else:
        packages.append(TORCH_PIN)
        print(f"Installing {TORCH_PIN}: {TORCH_SIZE}.", flush=True)
    for part in levels:
        packages += ["-r", str(ROOT / "requirements" / f"{part}.txt")]
    run_pip(packages)
    if "dev" in levels:
        install_oracles()


def install_oracles():
    """Install what tests compare with, built by the torch that is there by now.

    Without dependencies: those that the oracles need are in the other files, and the
    rest would be a compiler of kernels that no test calls.
    """
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "mamba-ssm"]
    present = probe(venv_python())
    if present and present["triton"]:
        print("Using the triton that came with torch.", flush=True)
    else:
        options += ["-r", str(ROOT / "requirements" / "triton.txt")]
    options += ["-r", str(ROOT / "requirements" / "oracles.txt")]
    run_pip(options, PURE_PYTHON)


def run_pip(arguments, settings=None):
    """Install into the environment, with more environment variables set."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [str(venv_python()), "-m", "pip", "install", *quiet]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    variables = {**os.environ, **(settings or {})}
    if subprocess.run(command + arguments, env=variables).returncode:
        sys.exit("The packages could not be installed; see the messages above.")


def main():
    """Bring the environment to the level named on the command line."""
    level = sys.argv[1] if len(sys.argv) > 1 else "dev"
    if level not in LEVELS:
        sys.exit(f"Unknown level {level!r}: say one of {', '.join(LEVELS)}.")
    if is_complete(level):
        return
    if not is_usable():
        create()
    install(level)
    for name in levels_up_to(level):
        stamp(name).write_text(digest(name), encoding="utf-8")


if __name__ == "__main__":
    main()
