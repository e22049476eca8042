"""The Free Spoken Digit Dataset as log-mel spectrograms, one set of samples for each speaker.

3,000 recordings of the digits 0 to 9 at 8 kHz, by six speakers, fifty times each; recordings 0 to 4 of each digit are
the test set. Nothing but torch and the standard library reads them.
"""

from __future__ import annotations

import math
import tarfile
import wave
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

SAMPLE_RATE = 8000
FRAMES, BANDS = 40, 32
_HOP, _WINDOW = 160, 256
_TEST_RECORDINGS = 5


@dataclass(frozen=True)
class Samples:
    """Inputs of N x 1 x height x width, and N labels; for training and for the test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_speakers(data_dir: Path, cache: Path) -> dict[str, Samples]:
    """The samples of each speaker, by name.

    Args:
        data_dir: the data set's own folder, `fsdd` in it, or the one that holds either; with `recordings` as a folder
            or as `recordings.tar.xz`, which is unpacked into `cache`.
        cache: where to unpack.

    Raises:
        FileNotFoundError: there are no recordings.
    """
    paths = sorted(_recordings(data_dir, cache).glob("*_*_*.wav"))
    if not paths:
        raise FileNotFoundError(f"{data_dir} holds no recordings named DIGIT_SPEAKER_NUMBER.wav")
    mel = _mel_filters()
    found: dict[str, dict[bool, list[tuple[Tensor, int]]]] = {}
    for path in paths:
        digit, speaker, number = path.stem.split("_")
        parts = found.setdefault(speaker, {False: [], True: []})
        parts[int(number) < _TEST_RECORDINGS].append((_spectrogram(path, mel), int(digit)))
    return {name: Samples(_stacked(parts[False]), _stacked(parts[True])) for name, parts in found.items()}


def _recordings(data_dir: Path, cache: Path) -> Path:
    for folder in (data_dir / "recordings", data_dir / "fsdd" / "recordings"):
        if folder.is_dir():
            return folder
    for archive in (data_dir / "recordings.tar.xz", data_dir / "fsdd" / "recordings.tar.xz"):
        if archive.is_file():
            unpacked = cache / "fsdd"
            done = unpacked / "complete"
            if not done.exists():
                _unpack(archive, unpacked / "recordings")
                done.touch()
            return unpacked / "recordings"
    raise FileNotFoundError(f"{data_dir} has neither a folder `recordings` nor `recordings.tar.xz`, nor has fsdd in it")


def _unpack(archive: Path, folder: Path) -> None:
    """The files of an archive, by their own names: the filters of `tarfile` came after Python 3.11.0."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                (folder / Path(member.name).name).write_bytes(content.read())


def _spectrogram(path: Path, mel: Tensor) -> Tensor:
    """1 x bands x frames, with mean 0 and deviation 1; longer recordings lose their end, shorter ones get silence."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLE_RATE, 1, 2):
            raise ValueError(f"{path} is not of one channel with 16 bits at {SAMPLE_RATE} Hz")
        samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16).float() / 2**15
    length = (FRAMES - 1) * _HOP
    samples = F.pad(samples[:length], (0, max(0, length - len(samples))))
    spectrum = torch.stft(samples, _WINDOW, _HOP, window=torch.hann_window(_WINDOW), return_complex=True)
    features = (mel @ spectrum.abs().square() + 1e-6).log()
    return ((features - features.mean()) / features.std())[None]


def _mel_filters() -> Tensor:
    """Triangles of equal width on the mel scale: bands x frequencies."""
    highest = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, highest, BANDS + 2) / 2595) - 1)
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    low, middle, high = (corners[i : BANDS + i, None] for i in range(3))
    return torch.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle)).clamp(min=0)


def _stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
