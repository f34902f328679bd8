"""What is published: the source distribution is the repository, and the wheel holds the package and nothing else.

`make dist-check` goes on from here: it installs the wheel in a clean environment and uses it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.metadata import Metadata

from lowtide import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Both, as they would be uploaded: the wheel is built from the unpacked source distribution."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def wheel(dist) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel) -> Metadata:
    """Parsed and checked against the standard."""
    return Metadata.from_email(wheel.read(f"lowtide-{__version__}.dist-info/METADATA"))


def tracked() -> set[str]:
    """What git does not ignore."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout, or no git: there is nothing to compare with")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_source_distribution_is_the_repository(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    assert names - {"PKG-INFO"} == tracked()


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    files = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name and ".egg-info" not in name}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


@pytest.mark.parametrize(
    ("pattern", "least"),
    [(r"/simdevice/csrc/\w+\.cpp$", 15), (r"/templates/\w+\.(html|css)$", 5), (r"/(hardware|targets)/\w+\.json$", 2)],
)
def test_what_is_no_python_is_there(wheel, pattern, least):
    found = [name for name in wheel.namelist() if re.search(pattern, name)]
    assert len(found) >= least
    assert all(wheel.read(name) for name in found)


def test_the_metadata_is_valid_and_says_what_a_visitor_needs(metadata):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata.version.public == __version__
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.summary == project["description"]
    assert set(metadata.provides_extra) == set(project["optional-dependencies"])
    assert "Typing :: Typed" in metadata.classifiers
    assert set(metadata.classifiers) == set(project["classifiers"])


def test_the_command_and_the_plugin_are_registered(wheel):
    points = wheel.read(f"lowtide-{__version__}.dist-info/entry_points.txt").decode()
    assert "[console_scripts]\nlowtide = lowtide.cli:app" in points
    assert "[pytest11]\nlowtide = lowtide_pytest" in points
