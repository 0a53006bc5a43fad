"""`python -m bev_scenes [folder] [seed]` writes two pictures of a scene."""

from __future__ import annotations

import sys
from pathlib import Path

from bev_scenes._poster import draw_scene

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    folder.mkdir(parents=True, exist_ok=True)
    for path in draw_scene(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        print(path)
