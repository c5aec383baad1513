"""Results that other sources gave are not taken for these ones', and the table says what was not
run.
"""

import json

from tests.parity import report, results
from tests.parity.cases import Case


def test_results_of_other_sources_are_left_out(tmp_path):
    path = tmp_path / "deep" / "found.jsonl"
    assert results.load(path) == {}
    results.keep(path, "one", error=1.0)
    results.keep(path, "one", error=2.0)
    with path.open("a") as out:
        out.write(json.dumps({"case": "two", "error": 0.0, "sources": "others"}) + "\n")
    assert {case: entry["error"] for case, entry in results.load(path).items()} == {"one": 2.0}


def test_the_table_tells_what_ran_what_failed_and_what_did_not_run(monkeypatch):
    good, bad, left = (Case(name, 2, 1, 4) for name in ("gpipe", "1f1b", "zb_h1"))
    cases, undefined = (good, bad, left), (Case("1f1b", 2, 3, 4),)
    monkeypatch.setattr("tests.parity.cases.full_grid", lambda: (cases, undefined))
    have = {
        str(good): entry(bits="same", passed=True),
        str(bad): entry(bits="same", passed=False, step=0.5),
    }
    text = "\n".join(report._grid(have))
    assert (
        f"cases {len(cases)}, run 2 ({2 / len(cases):.1%}), failed 1; combinations without such "
        f"a table {len(undefined)}" in text
    )
    assert f"FAILED {bad}: " in text
    assert "5.0e-01" in text
    assert "Not run:" in text
    # Both run every stage's backwards in order of microbatches.
    assert (
        "groups of two or more 1 (2 cases), equal bit for bit in loss and all gradients 1"
        in "\n".join(report._bits(have))
    )
    have[str(bad)]["bits"] = "other"
    assert "in the other 1 the last digits differ" in "\n".join(report._bits(have))


def entry(**found):
    return {
        "step": 1e-16,
        "losses": 0.0,
        "torch": 1e-16,
        "limit": 1e-12,
        "seconds": 1.0,
        "fault": "",
        **found,
    }
