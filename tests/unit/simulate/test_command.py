"""``kvtier simulate``: options, the table, JSON, and what makes no sense."""

import json

import pytest
from click.testing import CliRunner

from kvtier.cli import main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [[1, 2, 3], [7, 8, 9], [7, 8, 9, 10], [1, 2, 3, 4]]
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(main, ["simulate", "fleet", *arguments])


def rows(*arguments):
    outcome = run(*arguments, "-o", "json")
    assert outcome.exit_code == 0, outcome.output
    return {row["hosts"]: row for row in json.loads(outcome.stdout)}


def test_fleets_of_several_sizes_and_one_host_with_the_memory_of_each(trace):
    found = rows(trace, "--hosts", "1,2", "--slots", "4")
    assert list(found) == ["1", "2", "one with the memory of 2"]
    # One host of four: xyz pushes out all but a; then xyz is found, and abcd finds nothing.
    assert [row["local"] for row in found.values()] == [3, 6, 6]
    assert [row["asked"] for row in found.values()] == [14, 14, 14]


def test_what_goes_to_the_store_and_comes_from_it_is_told_in_bytes(trace):
    options = ("--hosts", "2", "--slots", "4", "--router", "round-robin", "--remote", "through", "--block-bytes", "100")
    row = rows(trace, *options)["2"]
    assert (row["remote"], row["put"], row["put_bytes"], row["read_bytes"]) == (6, 8, 800, 600)
    row = rows(trace, *options, "--peers")["2"]
    # 789 are still on the other host. 123 made room for them, and are in the store only.
    assert (row["remote"], row["peers"], row["read_bytes"]) == (3, 3, 300)


def test_a_disk_and_only_the_first_requests(trace):
    assert rows(trace, "--hosts", "1", "--slots", "4", "--disk-slots", "8")["1"]["local"] == 6
    assert rows(trace, "--hosts", "1", "--requests", "2")["1"]["requests"] == [2]


def test_the_table_as_a_person_reads_it(trace):
    outcome = run(trace, "--hosts", "2", "--slots", "4", "--router", "round-robin", "--remote", "through")
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert ["2", "0.429", "0.000", "0.000", "0.429", "8.0", "MiB", "6.0", "MiB", "6", "1.00"] in lines


def test_a_trace_without_requests_is_a_table_of_nothing(tmp_path):
    (tmp_path / "empty").write_text("")
    assert "0.000" in run(str(tmp_path / "empty"), "--hosts", "2").stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hosts", "0"], "1<=x<=64"),
        (["--hosts", "2,65"], "65 is not in the range 1<=x<=64"),
        (["--hosts", "2;3"], "'2;3' is not a valid integer"),
        (["--hosts", ""], "'' is not a valid integer"),
        (["--slots", "0"], "x>=1"),
        (["--router", "random"], "round-robin"),
        (["--remote", "sometimes"], "second_use"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(trace, options, says):
    outcome = run(trace, *options)
    assert outcome.exit_code == 2
    assert says in outcome.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "must be a JSON object"),
        ('{"hash_ids": [3, 2]}', "hash_ids = 2: must be an id that always follows the same id"),
        ('{"hash_ids": [2]}', "hash_ids = 2: must be an id that always follows the same id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    (tmp_path / "t").write_text(f'{{"hash_ids": [1, 2]}}\n{line}\n')
    outcome = run(str(tmp_path / "t"))
    assert outcome.exit_code == 1
    assert "t:2" in outcome.output
    assert says in outcome.output
