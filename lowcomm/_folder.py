"""One directory of checkpoints: which are whole, and what is left of others.

A checkpoint is whole if its directory has its final name, its manifest the digest of
itself, and its files the sizes and digests of the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

MANIFEST = "manifest.json"

_WHOLE = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"step-(\d{8,})\.([0-9a-f]+)-(\d+|old)\.(unfinished|replaced)")
_PROBE = "probe-"

#: Runs of this process: what they have not finished is not removed by others.
_runs: set[str] = set()

Manifest = dict[str, Any]


class Broken(Exception):
    """A checkpoint is not whole; says which file, and why."""


class Folder:
    """The directory of a run, for the worker that keeps it in order, and for others.

    Args:
        path: of the directory.
        run: names the run, other than all that have been there before.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self._run = run
        _runs.add(run)

    def of_step(self, step: int) -> Path:
        """Where a whole checkpoint is."""
        return self.path / _name(step)

    def unfinished(self, step: int, number: int) -> Path:
        """Where the run's save of that number is written."""
        return self.path / f"{_name(step)}.{self._run}-{number}.unfinished"

    def steps(self) -> dict[int, Path]:
        """All that have the name of a whole one, newest first."""
        names = [(path, _WHOLE.fullmatch(path.name)) for path in self.path.iterdir()]
        found = {int(match[1]): path for path, match in names if match}
        return dict(sorted(found.items(), reverse=True))

    def inspect(self) -> tuple[list[Manifest], list[tuple[int, str]]]:
        """Manifests of what looks whole, newest first, and why other steps do not."""
        manifests, broken = [], []
        for step, folder in self.steps().items():
            try:
                manifests.append(read_manifest(folder))
            except Broken as error:
                broken.append((step, str(error)))
        return manifests, broken

    def begun(self) -> list[str]:
        """Names of saves that have been begun and not finished."""
        return [f"{m[2]}-{m[3]}" for _, m in self._left() if m[4] == "unfinished"]

    def publish(self, unfinished: Path, step: int) -> None:
        """Gives a checkpoint its final name. A kill leaves the one before it whole."""
        sync_folder(unfinished)
        target = self.of_step(step)
        if target.exists():
            os.rename(target, unfinished.with_suffix(".replaced"))
        os.rename(unfinished, target)
        sync_folder(self.path)

    def bring_back(self) -> None:
        """Takes back what was to be replaced when the run ended."""
        for path, left in self._left():
            target = self.of_step(int(left[1]))
            if left[4] == "replaced" and self._is_free(left) and not target.exists():
                os.rename(path, target)

    def remove_old(self, step: int, keep: int) -> None:
        """Removes what is older than the newest `keep` whole ones up to a step."""
        num_whole = 0
        for other, folder in self.steps().items():
            if other > step:
                continue  # of an earlier run, which was not taken up from there
            if num_whole == keep:
                left = folder.with_name(f"{folder.name}.{self._run}-old.unfinished")
                os.rename(folder, left)
                _remove(left)
                continue
            with contextlib.suppress(Broken):
                read_manifest(folder)
                num_whole += 1

    def clean(self, last: int) -> None:
        """Removes what earlier runs have left, and saves of this one up to a number."""
        for path, left in self._left():
            is_over = left[3] == "old" or int(left[3]) <= last
            if self._is_free(left) and (left[2] != self._run or is_over):
                _remove(path)
        for path in self.path.glob(f"{_PROBE}*"):
            path.unlink(missing_ok=True)

    def _left(self) -> list[tuple[Path, re.Match[str]]]:
        """What is neither whole nor anybody else's."""
        names = [(path, _LEFT.fullmatch(path.name)) for path in self.path.iterdir()]
        return [(path, match) for path, match in names if match]

    def _is_free(self, left: re.Match[str]) -> bool:
        """Whether it belongs to no other run of this process."""
        return left[2] == self._run or left[2] not in _runs


def probe(path: Path, token: str) -> Path:
    """A file by which others see that they have the same directory."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)
    file = path / f"{_PROBE}{token}"
    file.touch()
    return file


def sees(path: Path, token: str) -> bool:
    """Whether the probe is there; by listing: that it was missing may be cached."""
    return f"{_PROBE}{token}" in os.listdir(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _name(step: int) -> str:
    return f"step-{step:08d}"


# --- reading --------------------------------------------------------------------------


def seal(manifest: Manifest) -> Manifest:
    """The manifest with a digest of itself."""
    text = json.dumps({k: v for k, v in manifest.items() if k != "sha256"})
    return {**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there; raises `Broken`."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Broken(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Broken(f"{path} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest != seal(manifest):
        raise Broken(f"{path} is not as it was written")
    if _name(manifest["step"]) != folder.name:
        raise Broken(f"{path} is of step {manifest['step']}")
    for name, facts in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise Broken(f"{folder / name} cannot be read: {error.strerror}") from None
        if size != facts["bytes"]:
            raise Broken(
                f"{folder / name} has {size} bytes instead of {facts['bytes']}"
            )
    return manifest


def read_tensors(path: Path, facts: Mapping[str, Any]) -> Any:
    """What a file of a checkpoint holds, if it is as it was written."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Broken(f"{path} cannot be read: {error.strerror}") from None
    if digest != facts["sha256"]:
        raise Broken(f"{path} is not as it was written: its sha256 is {digest[:8]}...")
    try:
        with warnings.catch_warnings():
            # Of sparse tensors torch says how long it takes to look at them.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Warning:  # an error where it is asked for, which is no fault of the file
        raise
    except Exception as error:
        raise Broken(f"{path} cannot be read: {error}") from None


# --- writing --------------------------------------------------------------------------


def write_tensors(path: Path, content: Any) -> dict[str, Any]:
    """Writes what `torch.load` reads onto the disk, and says what was written."""
    try:
        with _named(path), open(path, "wb") as file:
            hashed = _Hashed(file)
            try:
                torch.save(content, hashed)  # type: ignore[arg-type]
            except RuntimeError:
                if hashed.error is None:
                    raise
                raise hashed.error from None
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # it may be the disk that is full
            path.unlink()
        raise
    return {"bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}


def write_json(path: Path, content: Any) -> None:
    """Writes a file onto the disk that appears whole or not at all."""
    part = path.with_suffix(".part")
    with _named(path), open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)


def sync_folder(path: Path) -> None:
    """Puts the names of a directory's files onto the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        with _named(path):
            os.fsync(number)
    finally:
        os.close(number)


def sizes(path: Path) -> list[tuple[str, int]]:
    """The files of a directory and how large they are, as far as they can be seen."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted((entry.name, entry.stat().st_size) for entry in entries)
    return []


class _Hashed:
    """A file that counts and hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None  # torch's writer raises one of its own

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Gives errors of the system the path, where they have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
