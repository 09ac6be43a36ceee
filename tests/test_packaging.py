"""What is on disk, what is listed, and what a wheel holds are the same; the client needs no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "kernels", "prefix_cache", "sessions", "tools_bridge")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    """Every folder with Python files under the five code folders, and the demo model's data."""
    found = {"moorage.demo_model"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "__pycache__" not in path.parts:
                found.add("moorage." + ".".join(path.parent.relative_to(ROOT).parts))
    return found


def test_the_list_of_packages_is_what_is_on_disk() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_the_source_links_point_at_the_folders() -> None:
    links = {
        path.name: path.readlink()
        for path in (ROOT / ".src" / "moorage").iterdir()
        if path.is_symlink()
    }
    assert links == {folder: Path("../..") / folder for folder in FOLDERS}
    assert not (ROOT / ".src" / "moorage" / "__init__.py").exists()


@pytest.mark.timeout(180)
def test_the_wheel_holds_every_module_the_proto_and_the_model(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since a build leaves files beside its source
    left_out = shutil.ignore_patterns(
        ".venv", ".git", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*build, "-w", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
        timeout=170,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            inside = f"moorage/{path.relative_to(ROOT)}"
            if path.suffix in (".py", ".typed", ".proto") and "__pycache__" not in path.parts:
                assert inside in names, f"{inside} is not in the wheel"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert f"moorage/demo_model/{name}" in names
    assert not [name for name in names if not name.startswith("moorage/")]
    assert "moorage/__init__.py" not in names


def test_the_client_imports_no_torch_and_no_engine() -> None:
    code = (
        "import sys; from moorage.sessions import Client; Client('127.0.0.1:1')\n"
        "heavy = ('torch', 'torch.', 'moorage.engine', 'moorage.kernels')\n"
        "print([m for m in sys.modules if m == 'torch' or m.startswith(heavy[1:])])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert output.stdout.strip() == "[]"


def test_the_readme_names_every_module() -> None:
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("## The life")[0]
    listed = {
        line.split()[0] for line in tree.splitlines() if line.startswith("  ") and line.split()
    }
    modules = {
        str(path.relative_to(ROOT / folder))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
        and "_pb2" not in path.name
        and "__pycache__" not in path.parts
    }
    assert modules - listed == set()
