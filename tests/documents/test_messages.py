"""The answer as a message: the same rows in every form, and names that stay text."""

from __future__ import annotations

from typing import Any

from tests.documents.evil import EVIL
from tests.reports import report_with
from tracekit.dashboards.documents.markdown import messages
from tracekit.report.report import Report

ADDRESS = "https://tracekit.example.com/job?job=x"


def report(name: str = "llama-70b", **answer: Any) -> Report:
    known = {
        "headline": "rank 9 costs 31% of each step: computes 80% slower than its peers",
        "cost": "343.5 ms of every step",
        "who": "rank 9 on host-0001",
        "why": "computes 80% slower than its peers; noise alone makes 0.2%",
        "action": "Swap it",
        "check": "DCGM",
        "saves": "saves 343.5 ms a step",
        "trust": "replay within 0.0%",
    }
    return report_with(job={"name": name}, answer=known | answer)


def test_each_form_has_the_answer_and_the_way_back() -> None:
    found = messages(report(), ADDRESS)
    headline = "rank 9 costs 31% of each step: computes 80% slower than its peers"
    assert found == {
        "Markdown": f"**[llama-70b]({ADDRESS}): {headline}**\n\n|  | Answer |\n| --- | --- |\n"
        "| Cost | 343.5 ms of every step |\n| Who | rank 9 on host-0001 |\n| Do | Swap it |\n"
        "| Saves | 343.5 ms a step |\n| Trust | yes: replay within 0.0% |\n",
        "Slack": f"*llama-70b: {headline}*\n\u2022 *Cost:* 343.5 ms of every step\n\u2022 *Who:* rank 9 on host-0001\n"
        "\u2022 *Do:* Swap it\n\u2022 *Saves:* 343.5 ms a step\n\u2022 *Trust:* yes: replay within 0.0%\n"
        f"{ADDRESS}\n",
        "Jira": f"h3. [llama-70b|{ADDRESS}]\n*{headline}*\n||Cost|343.5 ms of every step|\n||Who|rank 9 on host-0001|\n"
        "||Do|Swap it|\n||Saves|343.5 ms a step|\n||Trust|yes: replay within 0.0%|\n",
    }


def test_a_row_that_the_report_lacks_is_left_out_and_another_why_is_told() -> None:
    found = messages(report(cost=None, action=None, saves=None, why="waits for its disk"), ADDRESS)
    for text in found.values():
        assert "Cost" not in text
        assert "Saves" not in text
        assert "DCGM" in text
        assert "waits for its disk" in text


def test_names_are_text_in_every_form() -> None:
    found = messages(report("{color} [a|b] *b* @channel\nnext \ue000", who=f"|| x @here {EVIL}"), ADDRESS)
    for text in found.values():
        assert "\ue000" not in text
        assert "\nnext" not in text
    assert "@channel" not in found["Slack"]
    assert "@here" not in found["Slack"]
    assert r"\{color\} \[a\|b\] \*b\*" in found["Jira"]
    assert r"||Who|\|\| x @here" in found["Jira"]
    assert "&#64;channel" in found["Markdown"]
    assert "<" not in found["Markdown"]
