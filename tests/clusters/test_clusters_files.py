"""What users copy is tested: each file of deploy/ by the tests beside this one, and named on docs/clusters.md."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_is_used_and_described():
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("*.py"))
    page = (ROOT / "docs" / "clusters.md").read_text()
    files = [file for file in (ROOT / "deploy").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert len(files) > 12
    assert [file.name for file in files if file.stem not in tests] == []
    assert [file.name for file in files if file.name not in page] == []
