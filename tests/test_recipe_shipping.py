"""What an installed package offers: recipes by name, in any folder, without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.recipe import shipped_recipes

ROOT = Path(__file__).parent.parent
COMMAND = "import sys; from slipstream.cli import main; main(sys.argv[1:])"


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of the package holds."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    shutil.copytree(ROOT / "slipstream", source / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, wheels], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_installed(site: Path, folder: Path, *words: str, code: str = COMMAND) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_the_recipes_and_takes_them_by_name(installed: Path, tmp_path: Path) -> None:
    where = run_installed(installed, tmp_path, code="import slipstream; print(slipstream.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    listed = run_installed(installed, tmp_path, "recipes")
    assert all(f"\n{name} " in f"\n{listed}" for name in shipped_recipes())
    assert "dir: runs/quickstart" in run_installed(installed, tmp_path, "train", "quickstart", "--dry-run")


def test_each_recipe_is_listed_with_its_first_comment(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    for name, path in shipped_recipes().items():
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        described = line.removeprefix(name).strip()
        assert len(described) > 20 and path.read_text().startswith(f"# {described}\n")


def test_a_printed_recipe_is_a_copy_that_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("recipes", "smollm2-reasoner") == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "mine.yaml") == load_config("smollm2-reasoner")
    assert call("recipes", "quickstar") == 2
    assert "those that do: dapo, quickstart, " in capsys.readouterr().err


def test_eval_takes_a_shipped_recipe_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tasks.eval.heldout.size=2", "sampling.max_new_tokens=4", "engine.max_sequences=2"]
    assert call("eval", "quickstart", "--json", *words) == 0
    assert "eval/heldout/avg@1" in capsys.readouterr().out
    assert call("eval", "quickstar") == 2
    assert "no run, checkpoint or recipe at quickstar" in capsys.readouterr().err
