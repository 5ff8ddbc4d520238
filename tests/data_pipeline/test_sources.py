"""Documents of every kind of source, in order, and what happens to records that cannot be used."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3train.config.schema import DataConfig
from k3train.data.sources import BadDocument, documents, held_out, open_source


def read(config: DataConfig) -> tuple[list[tuple[str, str]], list[str]]:
    """Documents, and records skipped."""
    generator = documents(open_source(config), config.on_bad_line)
    found = []
    while True:
        try:
            found.append(next(generator))
        except StopIteration as end:
            return found, end.value


def jsonl(path, **kw) -> DataConfig:
    return DataConfig(source="jsonl", path=str(path), **kw)


def test_standard_library_is_real_text_in_stable_order():
    source = open_source(DataConfig())
    names = [source.name(i) for i in range(len(source))]
    assert names == sorted(set(names)) and len(names) > 500
    assert "argparse.py" in names and "json/decoder.py" in names
    apart = {"test", "tests", "site-packages", "__pycache__", "idle_test"}
    assert not any(apart & set(name.split("/")[:-1]) for name in names)
    assert "class ArgumentParser" in source.read(names.index("argparse.py"))


def test_standard_library_takes_no_path():
    for kind in ("stdlib", "stdlib_chat"):
        with pytest.raises(ValueError, match=f"data.path='somewhere': source '{kind}' takes no path"):
            open_source(DataConfig(source=kind, path="somewhere"))


def test_text_folder_file_and_glob(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes("zwei\r\nüber".encode())
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.md").write_text("three")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("no")
    folder, _ = read(DataConfig(source="text", path=str(tmp_path)))
    assert folder == [("a.txt", "one"), ("c.md", "three"), ("sub/b.txt", "zwei\r\nüber")]
    assert open_source(DataConfig(source="text", path=str(tmp_path))).notes == ("left out 1 empty files",)
    globbed, _ = read(DataConfig(source="text", path=f"{tmp_path}/**/*.txt"))
    assert [name for name, _ in globbed] == ["a.txt", "sub/b.txt"]
    single, _ = read(DataConfig(source="text", path=str(tmp_path / "sub" / "b.txt")))
    assert single == [("b.txt", "zwei\r\nüber")]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "chat"])
def test_nothing_there_is_one_short_message(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.jsonl").touch()
    for path, said in [
        ("", "data.path is empty"),
        (tmp_path / "missing", "no such file or folder"),
        (tmp_path / "empty", "no file matches"),
        (f"{tmp_path}/empty/*.x", "no file matches"),
        (tmp_path / "nothing.jsonl", "the file is empty"),
    ]:
        with pytest.raises(ValueError, match=said) as caught:
            open_source(DataConfig(source=kind, path=str(path)))
        assert "\n" not in str(caught.value)


def test_folder_of_empty_files(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"no documents, 2 file\(s\) are empty"):
        open_source(DataConfig(source="text", path=str(tmp_path)))


def test_text_that_cannot_be_decoded_names_file_and_byte(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"abc\xffdef")
    config = DataConfig(source="text", path=str(tmp_path))
    with pytest.raises(BadDocument, match=r"b\.txt: no valid UTF-8: byte 0xff at offset 3"):
        read(config)
    found, bad = read(DataConfig(source="text", path=str(tmp_path), on_bad_line="skip"))
    assert found == [("a.txt", "good")] and len(bad) == 1


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    source = open_source(DataConfig(source="text", path=str(tmp_path)))
    (tmp_path / "a.txt").unlink()  # stands for any reason the system gives; permissions do not bind root
    with pytest.raises(BadDocument, match=r"a\.txt: cannot be read: No such file"):
        source.read(0)


def test_jsonl_lines_keep_physical_numbers(tmp_path):
    lines = ["\ufeff" + json.dumps({"text": "first"}), "", json.dumps({"text": "dritte Zeile: äöü", "id": 3}), "  "]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    (tmp_path / "b.jsonl").write_text('{"text": "last, no newline"}')
    found, _ = read(jsonl(tmp_path))
    assert found == [("a.jsonl:1", "first"), ("a.jsonl:3", "dritte Zeile: äöü"), ("b.jsonl:1", "last, no newline")]
    source = open_source(jsonl(tmp_path))
    assert [source.name(i) for i in (2, 0, 1)] == ["b.jsonl:1", "a.jsonl:1", "a.jsonl:3"]


BAD_LINES = {
    b'{"text": "broken': "no valid JSON: Unterminated string",
    b"[1, 2]": "expected a JSON object, found an array",
    b"null": "expected a JSON object, found null",
    b'"words"': "expected a JSON object, found a string",
    b'{"body": "x", "id": 1}': r"field 'text' is missing \(fields: 'body', 'id'\)",
    b'{"text": ""}': "field 'text' is empty",
    b'{"text": "  "}': "field 'text' is empty",
    b'{"text": 5}': "field 'text' is int, expected text",
    b'{"text": null}': "field 'text' is NoneType, expected text",
    b'{"text": "\xff"}': "no valid UTF-8: byte 0xff",
    b'{"text": "ab\\ud800"}': "half a surrogate pair at character 2",
    b"[" * 100_000: "JSON",
    b'{"text": "x", "n": ' + b"9" * 5000 + b"}": "JSON beyond what is read",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[str(i) for i in range(len(BAD_LINES))])
def test_bad_line_is_named_by_file_line_and_reason(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}\n')
    with pytest.raises(BadDocument, match=rf"data\.jsonl:3: .*{BAD_LINES[line]}"):
        read(jsonl(path))
    found, bad = read(jsonl(path, on_bad_line="skip"))
    assert [name for name, _ in found] == ["data.jsonl:1", "data.jsonl:4"]
    assert len(bad) == 1 and "data.jsonl:3" in bad[0]


def test_jsonl_field_is_configurable(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x", "text": 3}\n')
    assert read(jsonl(tmp_path, text_field="content"))[0] == [("a.jsonl:1", "x")]


def test_parquet_rows_over_files_and_row_groups(tmp_path):
    texts = [f"document {i}" for i in range(7)]
    pq.write_table(pa.table({"text": texts[:5], "n": range(5)}), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": texts[5:]}), tmp_path / "b.parquet")
    source = open_source(DataConfig(source="parquet", path=str(tmp_path)))
    order = [6, 0, 3, 5, 1, 2, 4]
    assert [source.read(i) for i in order] == [texts[i] for i in order]
    assert [source.name(i) for i in range(7)] == [f"a.parquet:{i}" for i in range(1, 6)] + [
        "b.parquet:1",
        "b.parquet:2",
    ]


def test_parquet_faults_are_named(tmp_path):
    pq.write_table(pa.table({"text": ["x", None, ""]}), tmp_path / "a.parquet")
    config = DataConfig(source="parquet", path=str(tmp_path / "a.parquet"))
    with pytest.raises(BadDocument, match=r"a\.parquet: row 2: column 'text' is NoneType"):
        read(config)
    with pytest.raises(ValueError, match=r"column 'body' \(data.text_field\) is missing; columns: text"):
        open_source(DataConfig(source="parquet", path=config.path, text_field="body"))
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"c\.parquet: no parquet file"):
        open_source(DataConfig(source="parquet", path=str(tmp_path / "c.parquet")))


def test_parquet_damage_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(100)]}), path)
    raw = bytearray(path.read_bytes())
    raw[4:60] = b"\xff" * 56
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"a\.parquet: row group 0 cannot be read"):
        read(DataConfig(source="parquet", path=str(path)))


def test_file_names_that_are_no_utf8():
    assert held_out([os.fsdecode(b"\xff.txt"), "a.txt"], 0.1).sum() == 1


def test_held_out_is_a_stable_share_by_name():
    names = [f"file_{i}.py" for i in range(2000)]
    out = held_out(names, 0.1)
    assert 150 < out.sum() < 250
    # A document stays on its side whatever else is there and in whatever order.
    some = np.arange(0, 2000, 3)[::-1]
    assert np.array_equal(held_out([names[i] for i in some], 0.1), out[some])
    assert np.all(held_out(names, 0.2) >= out)


def test_held_out_never_leaves_a_side_empty():
    names = [f"{i}" for i in range(3)]
    assert held_out(names, 1e-9).sum() == 1
    assert held_out(names, 0.0).sum() == 0
    with pytest.raises(ValueError, match=r"eval_fraction=0.02: all 1 document\(s\) would be held out"):
        held_out(["only"], 0.02)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="expected 0 <= fraction < 1"):
            held_out(names, wrong)
