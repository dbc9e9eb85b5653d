"""Two builds of the same thing are the same bytes, wherever and by whatever process they are made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = """
import sys
from pelton import BuildConfig, build
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

config = BuildConfig(max_batch_size=2, max_seq_len=48, max_num_tokens=24)
build(RandomCheckpoint(TINY_LLAMA, quant="q8_0"), config, output=sys.argv[1], timing_cache=sys.argv[2])
"""
ROOT = Path(__file__).parents[2]


def test_processes_with_other_hash_seeds_names_and_places_build_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for seed, name in (("1", "one"), ("2", "another-name.engine")):
        place = tmp_path / seed
        place.mkdir()
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", BUILD, name, str(tmp_path / "times.json")]
        subprocess.run(command, check=True, cwd=place, env=environment)
        engine = place / name
        contents.append({p.relative_to(engine): p.read_bytes() for p in engine.rglob("*") if p.is_file()})
    one, another = contents
    assert one.keys() == another.keys() and len(one) > 6
    assert [path for path in one if one[path] != another[path]] == []
