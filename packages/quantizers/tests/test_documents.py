"""Files of unknown hands: one clear error each, and files and folders whole or not at all."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
import zipfile
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import torch

from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calibrate
from bevquant_quantizers.documents import (
    Count,
    DocumentError,
    Finite,
    Size,
    check_arrays,
    pack_arrays,
    parse_json,
    read_arrays,
    read_content,
    read_json,
    read_tensors,
    sweep,
    write_arrays,
    write_folder,
    write_tensors,
    write_whole,
)


class Form(msgspec.Struct):
    frames: list[Count]
    scale: Finite = 1.0
    more: object = None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "input data was truncated"),
        (b"\xff\xfe{}", "malformed|not UTF-8"),
        (b"[]", "expected `object`, got `array`"),
        (b'{"frames": 5}', "at frames: expected `array`, got `int`"),
        (b'{"frames": [1, "2"]}', r"at frames\[1\]: expected `int`, got `str`"),
        (b'{"frames": [true]}', "expected `int`, got `bool`"),
        (b'{"frames": [-1]}', r"at frames\[0\]: expected `int` >= 0"),
        (b'{"frames": [], "scale": NaN}', "malformed"),
        (b'{"frames": [], "scale": 1e400}', "out of range"),
        (b'{"frames": [], "scale": ' + b"9" * 400 + b"}", "out of range|digits"),
        (b'{"frames": [], "more": ' + b"9" * 400 + b"}", "an integer of 400 digits"),
        (b'{"frames": [], "more": {"a": 9223372036854775808}}', "an integer of 19 digits"),
        (b'{"frames": [], "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "100 levels deep"),
        (b'{"frames": [], "more": ' + b'{"a":' * 101 + b"1" + b"}" * 102, "100 levels deep"),
    ],
)
def test_trap_48_json_has_one_error_with_the_field(tmp_path, text, said):
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    with pytest.raises(DocumentError, match=said) as caught:
        read_json(path, Form, what="plan")
    assert str(caught.value).startswith(f"{path} is not a plan: ")


def test_brackets_and_digits_in_texts_are_texts():
    text = json.dumps({"frames": [], "more": ["[" * 500, "9" * 400, 'a"\\' * 50, -(2**63)]})
    assert parse_json(text, Form).more[1] == "9" * 400


@pytest.mark.parametrize("value", [2, "1", True, None, 1.0])
def test_another_schema_is_told_first(value):
    with pytest.raises(DocumentError, match=r"schema .*, expected 1; save it again"):
        parse_json(
            json.dumps({"schema": value, "frames": "wrong too"}),
            Form,
            head={"schema": 1},
            remedy="save it again",
        )


def test_what_is_no_file_is_told(tmp_path):
    with pytest.raises(DocumentError, match=r"cannot read .*absent: no such file"):
        read_content(tmp_path / "absent")
    with pytest.raises(DocumentError, match="not a regular file"):
        read_content(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DocumentError, match="not a regular file"):  # and does not wait for it
        read_content(tmp_path / "pipe")


def test_arrays_come_back():
    arrays = {
        "a": np.arange(6, dtype=np.float16).reshape(2, 3), "t": np.array(["x", "yz"]),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)), "e": np.zeros((0, 3)),
        "s": np.array(2.5),
    }  # fmt: skip
    for compress in (False, True):
        found = read_arrays(pack_arrays(arrays, compress=compress))
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)
    assert read_arrays(pack_arrays(arrays), ["a"], optional=["t", "no"]).keys() == {"a", "t"}
    with pytest.raises(DocumentError, match=r"no array 'no'; the archive holds \['a', 'e'"):
        read_arrays(pack_arrays(arrays), ["no"])
    with pytest.raises(ValueError, match="o: a file holds numbers and text, not objects"):
        pack_arrays({"o": np.array([object()])})


def test_trap_48_every_flipped_bit_of_a_compressed_archive_has_one_error():
    good = pack_arrays({"points": np.arange(40.0).reshape(8, 5)}, compress=True)
    refused = 0
    for place in range(len(good)):
        for bit in (0, 3, 7):
            damaged = bytearray(good)
            damaged[place] ^= 1 << bit
            with suppress(DocumentError):  # anything else fails the test
                read_arrays(bytes(damaged), where="p.npz")
                continue
            refused += 1
    assert refused > len(good)


def npy(header: str, data: bytes = b"") -> bytes:
    raw = header.encode() + b"\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        head = b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little")
        archive.writestr("a.npy", head + raw + data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}",
            "more than is read",
        ),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}", "holds 8 bytes or more where"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "pickled Python objects"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", "no plain array"),
        ("(" * 3000, "damaged"),
        ("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,)}", "no plain array"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(header, said):
    with pytest.raises(DocumentError, match=said):
        read_arrays(npy(header, b"\0" * 8))


def test_tensors_come_back_with_metadata(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    path = write_tensors(tmp_path / "w.safetensors", {"a": shared, "b": shared.T}, {"k": "v"})
    for source in (path, path.read_bytes()):
        found = read_tensors(source)
        assert found.metadata == {"k": "v"}
        assert torch.equal(found.tensors["b"], shared.T)
    for damaged in (b"", b"{}", path.read_bytes()[:-1], b"\xff" * 40):
        path.write_bytes(damaged)
        with pytest.raises(DocumentError, match=r"w\.safetensors is not a state dict: damaged"):
            read_tensors(path, "state dict")


def test_disk_full_is_one_error_and_leaves_nothing(tmp_path):
    script = (
        "import atexit, gc; gc.disable(); atexit.register(gc.freeze)\n"  # a quarter of imports
        "import resource, signal, sys, torch\n"
        "from bevquant_quantizers.documents import write_folder, write_tensors, write_arrays\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "place = sys.argv[1]\n"
        "for write in (lambda p: write_tensors(p, {'a': torch.ones(9999)}),\n"
        "              lambda p: write_arrays(p, {'a': torch.ones(9999).numpy()})):\n"
        "    try: write(place + '/file')\n"
        "    except OSError as error: print(error.errno, error.filename)\n"
        "try:\n"
        "    with write_folder(place + '/run') as work:\n"
        "        write_tensors(work / 'w', {'a': torch.ones(9999)})\n"
        "except OSError as error: print(error.errno)\n"
    )
    # -B: what is first imported under the limit would leave its cut-off bytecode to all others.
    run = subprocess.run(
        [sys.executable, "-B", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    said = f"{errno.EFBIG} {tmp_path}/file"
    assert run.stdout.splitlines() == [said, said, str(errno.EFBIG)]
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with write_folder(tmp_path / "run") as work:
        write_whole(work / "a", "old")
    with pytest.raises(ValueError, match="does not exist"), write_folder(tmp_path / "run") as work:
        write_whole(work / "absent" / "a", "new")
    assert (tmp_path / "run" / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_the_target_of_a_link_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest"
    link.symlink_to("runs/1")
    for content in ("new", "newer"):
        assert write_whole(link, content) == link
        assert link.is_symlink()
        assert (tmp_path / "runs" / "1").read_text() == content
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["1"]


def test_a_folder_behind_a_link_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest"
    link.symlink_to("runs/1")
    for content in ("new", "newer"):
        with write_folder(link) as work:
            write_whole(work / "a", content)
        assert link.is_symlink()
        assert (tmp_path / "runs" / "1" / "a").read_text() == content
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "runs"]


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "content")
        assert os.read(reader, 99) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_killed_writers_left_is_removed_and_living_ones_are_left_alone(tmp_path):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from bevquant_quantizers.documents import write_folder\n"
        "with write_folder(Path(sys.argv[1]) / 'run') as work:\n"
        "    (work / 'a').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    own = tmp_path / ".mine"
    own.mkdir()
    with write_folder(tmp_path / "other") as work:
        assert sweep(tmp_path) == [left]
        assert work.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine", "other"]


def collected(path):
    def fresh():
        return torch.nn.Sequential(TensorQuantizer(QuantDescriptor(calib_method="histogram")))

    batches = [torch.full((8,), float(i + 1)) for i in range(4)]
    if path.exists():
        return calibrate(fresh(), batches, resume=path)
    return calibrate(fresh(), batches[:2], resume=path)


ROW = ("bins", "upper", "shift", "max", "values", "zeros", "nans", "infs")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shift", 10**10), ("shift", 2000), ("upper", 1e-320), ("upper", 1e300), ("bins", 0),
        ("bins", 2**31 - 1), ("max", 1e300), ("values", -1), ("values", 2**60), ("zeros", 999),
        ("nans", 3), ("upper", -1.0), ("upper", 0.0), ("max", 1e30), ("shift", "x"), ("bins", None),
    ],
)  # fmt: skip
def test_a_saved_collection_says_only_what_can_have_been_counted(tmp_path, field, value):
    path = tmp_path / "c.npz"
    collected(path)
    arrays = read_arrays(path)
    header = json.loads(arrays["header"].tobytes())
    header["states"][0]["rows"][0][ROW.index(field)] = value
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    write_arrays(path, arrays)
    with pytest.raises(DocumentError, match=r"c\.npz: .*: delete it to begin anew"):
        collected(path)


def test_sizes_that_fit_an_axis():
    assert parse_json("[0, 2147483647]", list[Size]) == [0, 2**31 - 1]
    with pytest.raises(DocumentError, match="<= 2147483647"):
        parse_json("[2147483648]", list[Size])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"boxes": None}, "boxes is missing"),
        ({"boxes": np.array(1.0)}, r"boxes is float64 \[\], expected f \['rows', 7\]"),
        ({"boxes": np.zeros((2, 7), np.int64)}, "boxes is int64"),
        ({"names": np.array(["a"])}, r"names is <U1 \[1\], expected U \['rows'\]"),
        ({"count": np.zeros((), np.int64)}, "count is int64"),
    ],
)
def test_arrays_of_another_form_are_named(change, words):
    forms = {"boxes": ("f", ("rows", 7)), "names": ("U", ("rows",)), "count": (np.int32, ())}
    arrays = {
        "boxes": np.zeros((2, 7)), "names": np.array(["a", "b"]), "count": np.zeros((), np.int32)
    }  # fmt: skip
    check_arrays(arrays, forms, "record")
    changed = {name: array for name, array in {**arrays, **change}.items() if array is not None}
    with pytest.raises(DocumentError, match=f"not a record: {words}"):
        check_arrays(changed, forms, "record")
