"""The wheel builds, installs into an empty environment and works there, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONPATH")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("rackbook-*.whl")
    return built


def test_wheel_carries_the_data_and_the_notebooks(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("data", "notebooks"):
        committed = {
            p.relative_to(ROOT).as_posix()
            for p in (ROOT / folder).rglob("*")
            if p.is_file() and ".ipynb_checkpoints" not in p.parts
        }
        packed = {n.removeprefix("rackbook/_bundled/") for n in names if n.startswith(f"rackbook/_bundled/{folder}/")}
        assert packed == committed
    assert not [n for n in names if n.startswith(("tests/", "build/"))]


def test_wheel_works_in_an_empty_environment(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    # The same resolution in a tenth of pip's time, which was most of the time of all tests.
    uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python)
    run(*uv, "--constraint", ROOT / "requirements.lock", wheel, cwd=tmp_path)
    listing = run(tmp_path / "venv" / "bin" / "rackbook", "list", cwd=tmp_path)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert notebook.stem in listing
    run(tmp_path / "venv" / "bin" / "rackbook", "run", "01", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "report" / "index.html").is_file()
    assert list((tmp_path / "out" / "charts" / "01_context_sweep").glob("*.svg"))
