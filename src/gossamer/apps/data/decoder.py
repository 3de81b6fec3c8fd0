"""One image file to pixels: cut out, resized, flipped. Also a program that does so for another process until its input ends.

The program is started by path, not as a module, so that it starts in a tenth of a second: it must import nothing of gossamer, which
would bring torch with it. It is asked by lines of JSON and answers with a status byte, a length and that many bytes.
"""

from __future__ import annotations

import io
import json
import math
import random
import struct
import sys

from PIL import Image

_CENTRE = 224 / 256  # what evaluation looks at: as much of the shorter side
HEADER = struct.Struct("<?I")


def decode(path: str, size: int, seed: int | None) -> bytes:
    """RGB bytes ``[size, size, 3]``: a random part and side that ``seed`` alone decides, or the centre if it is None."""
    with open(path, "rb") as file:
        image = Image.open(io.BytesIO(file.read()), formats=("JPEG", "PNG")).convert("RGB")
    if seed is None:
        side = min(image.size) * _CENTRE
        left, top = (image.width - side) / 2, (image.height - side) / 2
        return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)).tobytes()
    draw = random.Random(seed)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=part(image.width, image.height, draw))
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image.tobytes()


def part(width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
    """A random part of 8 to 100 % of the area and 3:4 to 4:3 in shape: as training on ImageNet usually has it (Szegedy et al.)."""
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def main() -> None:
    for line in sys.stdin.buffer:
        try:
            answer, good = decode(**json.loads(line)), True
        except Exception as error:
            answer, good = f"{error or type(error).__name__}".encode(), False
        sys.stdout.buffer.write(HEADER.pack(good, len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the owner is gone
        sys.stderr.close()
