"""The report of a real (scripted) run: what it holds, and that a browser shows it without help from outside."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from demo import demo_run
from tiny_model import tiny_tokenizer

from kernelwright import store
from kernelwright.errors import BadRun
from kernelwright.report import write
from kernelwright.report.trajectories import pieces

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the run is made with the C backend; no cc here")
_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_run(tmp_path_factory.mktemp("report") / "run", steps=2)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write(run).read_text(encoding="utf-8")


def _data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_holds_the_run(run: Path, page: str) -> None:
    data = _data(page)
    metrics = store.metrics(run)
    assert data["curves"]["steps"] == [1, 2]
    assert data["curves"]["reward"]["mean"] == [line["reward"] for line in metrics]
    counted = {status: sum(values) for status, values in data["curves"]["statuses"].items()}
    assert sum(counted.values()) == 2 * 2 * 4 * 3
    heldout = data["evaluations"][0]
    measured = {line["phase"]: line for line in store.evaluations(run) if line["set"] == "heldout"}
    for phase in ("before", "after"):
        assert heldout[phase]["correct"] == [turn["correct"] for turn in measured[phase]["turns"]]
        assert heldout[phase]["any_correct"] == measured[phase]["avg"]["correct"]


def test_a_trajectory_is_told_whole(run: Path, page: str) -> None:
    shown = {(one["step"], one["task"], one["member"]): one for one in _data(page)["trajectories"]}
    assert len(shown) == 2 * 2 * 4
    for line in store.groups(run):
        for member, trajectory in enumerate(line.group.trajectories):
            one = shown[line.step, line.group.task, member]
            assert ["".join(turn["pieces"]) for turn in one["turns"]] == [turn.text for turn in trajectory.turns]
            for turn, record in zip(trajectory.turns, one["turns"], strict=True):
                assert len(record["pieces"]) == len(turn.completion.tokens) == len(record["logprobs"])
                assert record["feedback"] == (turn.outcome.feedback if turn.outcome else None)
                assert record["reward"] == pytest.approx(turn.outcome.reward if turn.outcome else None, abs=1e-4)
                if turn.source:
                    start, end = record["spans"]["code"]
                    assert turn.source in "".join(record["pieces"][start:end])
            assert one["turns"][0]["prompt"].count("class Model") == 1


def test_pieces_are_the_reply_whatever_the_characters() -> None:
    tokenizer: Any = tiny_tokenizer()
    text = "naïve 🙂 漢字\n<b>&amp;</b>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found = pieces(tokenizer.backend_tokenizer, [*tokens, tokenizer.eos_token_id])
    assert "".join(found) == text
    assert len(found) == len(tokens) + 1
    assert found[-1] == ""


def test_nothing_is_loaded_from_outside(page: str) -> None:
    without_data = re.sub(r'(<script type="application/json" id="data">).*?(</script>)', r"\1\2", page, flags=re.DOTALL)
    assert re.findall(r"\b(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", without_data) == []
    # the namespace of SVG is a name, not an address
    assert set(re.findall(r"https?://[^\s\"'`)]+", without_data)) == {"http://www.w3.org/2000/svg"}


def test_a_run_without_a_tokenizer_is_coloured_by_turn(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("tokenizer*"))
    turn = _data(write(copy, tmp_path / "page.html").read_text())["trajectories"][0]["turns"][0]
    group = next(line for line in store.groups(copy) if line.group.task == "builtin/abs")
    assert turn["pieces"] == [group.group.trajectories[0].turns[0].text]
    assert turn["advantages"] == pytest.approx(group.advantages[0][0], rel=1e-3)


def test_a_run_that_has_just_begun_has_a_report(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "config.json", tmp_path)
    data = _data(write(tmp_path).read_text())
    assert data["trajectories"] == []
    assert data["curves"]["steps"] == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRun, match="no run directory"):
        write(tmp_path)


# ---------------------------------------------------------------- in a browser

_WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => window.problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => window.problems.push(`blocked ${event.blockedURI}`));
for (const name of ["error", "warn"]) console[name] = (...words) => window.problems.push(words.join(" "));
</script>"""

_ACT = """<script>
const selected = (one) => one.getAttribute("aria-selected") === "true";
const seen = () => ({
  step: $("choose-step").value,
  task: $("choose-task").value,
  turns: document.querySelectorAll(".turn").length,
  chosen: [...$("members").children].findIndex(selected),
  text: $("trajectory").textContent,
  colours: [...document.querySelectorAll(".token")].map((one) => one.style.background),
});
const second = () => {
  $("choose-task").selectedIndex = 1;
  $("choose-task").dispatchEvent(new Event("change"));
};
const acts = {
  start: () => 0,
  member: () => $("members").children[2].click(),
  later: () => $("later").click(),
  task: second,
  shade: () => $("shade").click(),
};
const result = {};
for (const [name, act] of Object.entries(acts)) { act(); result[name] = seen(); }
result.charts = document.querySelectorAll("svg[role=img]").length;
result.loaded = performance.getEntriesByType("resource").map((one) => one.name);
result.problems = window.problems;
const box = document.createElement("pre");
box.id = "result";
box.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(result))));
document.body.append(box);
</script>"""


def _browse(page: str, folder: Path) -> dict[str, Any]:
    """What a browser without a network makes of the page, and of clicks on it."""
    assert _BROWSER is not None
    file = folder / "page.html"
    file.write_text(page.replace("<head>", f"<head>{_WATCH}").replace("</body>", f"{_ACT}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=4000", "--dump-dom"]
    shown = subprocess.run(
        [_BROWSER, *options, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    found = re.search(r'<pre id="result">([^<]*)</pre>', shown)
    assert found is not None, shown[-2000:]
    return json.loads(base64.b64decode(found.group(1)))


@pytest.mark.skipif(_BROWSER is None, reason="no Chromium or Chrome on the PATH")
def test_the_trajectory_view_works_in_a_browser(page: str, tmp_path: Path) -> None:
    seen = _browse(page, tmp_path)
    assert seen["problems"] == []
    assert seen["loaded"] == []
    # two charts of each of three task sets, and the curves
    assert seen["charts"] == 6 + 6
    assert [seen[name]["turns"] for name in ("start", "member", "later", "task")] == [3, 3, 3, 3]
    assert (seen["start"]["chosen"], seen["member"]["chosen"]) == (0, 2)
    assert (seen["member"]["step"], seen["later"]["step"]) == ("1", "2")
    assert (seen["later"]["task"], seen["task"]["task"]) == ("abs", "relu")
    assert "torch.relu" in seen["task"]["text"] or "F.relu" in seen["task"]["text"]
    assert seen["shade"]["colours"] != seen["task"]["colours"]
    for word in ("plan", "code", "feedback to the model", "reward", "evaluation", "#pragma GCC"):
        assert word in seen["start"]["text"]
