import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rz.tasks.text import TextTask, prompt_ids

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(*, adds_bos=False, adds_eos=False, template=None, bos="<s>", pad="<pad>"):
    """A byte-level tokenizer of a Hugging Face class; "1" and "2" side by side merge into one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(["<s>", "</s>", "<pad>", *letters, "12"])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>")])
    if adds_bos or adds_eos:
        single = f"{'<s> ' * adds_bos}$A{' </s>' * adds_eos}"
        fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=bos, eos_token="</s>", pad_token=pad, chat_template=template
    )


def exact_task(tokenizer, questions=(("1+1=", "2"), ("5+7=", "12")), **settings):
    judge = lambda answer, text: float(answer == text)
    return TextTask(
        tokenizer=tokenizer, question=list(questions).__getitem__, verifier=judge, size=len(questions), **settings
    )


def plain(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("question", ["hi 12", "<s>hi 12"])
def test_bos_is_there_once_and_no_eos_without_a_template(adds_bos, adds_eos, question):
    tokenizer = byte_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    ids = prompt_ids(tokenizer, question, chat_template=False)
    assert ids.count(0) == (adds_bos or question.startswith("<s>"))
    assert 1 not in ids
    assert ids[-4:] == plain(tokenizer, "hi 12")[-4:]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_is_there_once_with_a_template_that_writes_it(adds_bos):
    tokenizer = byte_tokenizer(adds_bos=adds_bos, adds_eos=True, template=TEMPLATE)
    ids = prompt_ids(tokenizer, "hi", chat_template=True)
    assert ids == (0, *plain(tokenizer, "[user]hi"), 1, *plain(tokenizer, "[assistant]"))


def test_a_template_without_bos_gives_none():
    tokenizer = byte_tokenizer(adds_bos=True, template=TEMPLATE.removeprefix("{{ bos_token }}"))
    assert 0 not in prompt_ids(tokenizer, "hi", chat_template=True)


def test_a_tokenizer_without_bos():
    tokenizer = byte_tokenizer(bos=None)
    assert prompt_ids(tokenizer, "hi", chat_template=False) == plain(tokenizer, "hi")


def test_the_template_is_used_where_there_is_one_unless_told_otherwise():
    with_one, without = byte_tokenizer(template=TEMPLATE), byte_tokenizer()
    assert [exact_task(with_one).chat_template, exact_task(without).chat_template] == [True, False]
    assert exact_task(with_one, chat_template=False).prompt(0).token_ids == plain(with_one, "1+1=")
    assert exact_task(with_one).prompt(0).token_ids == prompt_ids(with_one, "1+1=", chat_template=True)


def test_prompts_begin_again_and_keep_their_index():
    task = exact_task(byte_tokenizer())
    assert len(task) == 2
    assert [task.prompt(index).index for index in (1, 3)] == [1, 3]
    assert task.prompt(3).token_ids == task.prompt(1).token_ids != task.prompt(2).token_ids
    assert task.prompt(3).data == "12"


def test_a_task_without_an_end_has_no_len():
    task = TextTask(
        tokenizer=byte_tokenizer(), question=lambda i: (f"q{i}", i), verifier=lambda answer, text: 0.0, size=None
    )
    assert task.prompt(10**9).data == 10**9
    with pytest.raises(TypeError, match="len.. must not be asked of a task without an end, got size None"):
        len(task)


def test_scoring_takes_the_ids_as_sampled():
    tokenizer, asked = byte_tokenizer(), []
    one, two, twelve = (tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "12"))
    task = TextTask(
        tokenizer=tokenizer,
        question=lambda i: ("q", "12"),
        verifier=lambda answer, text: asked.append(text) or float(text == answer),
        size=1,
    )
    assert plain(tokenizer, tokenizer.decode([one, two])) == (twelve,)  # these ids do not survive a round trip
    response = (one, two, 1)
    assert task.score(task.prompt(0), response) == task.score(task.prompt(0), (twelve, 1)) == 1.0
    assert response == (one, two, 1)
    assert asked == ["12", "12"]
    assert task.decode((one, two, 1)) == "12</s>"


@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
def test_special_tokens_are_not_part_of_the_text_where_pad_may_be_eos(pad):
    tokenizer = byte_tokenizer(pad=pad)
    task = exact_task(tokenizer)
    assert task.stop_ids == (1,)
    assert task.score(task.prompt(0), (*plain(tokenizer, "2"), 1)) == 1.0
    assert task.score(task.prompt(0), plain(tokenizer, "2")) == 1.0
    assert task.score(task.prompt(0), ()) == 0.0
    assert task.score(task.prompt(0), (1,)) == 0.0


def test_an_id_beyond_the_tokenizer_scores_and_is_logged():
    task = exact_task(byte_tokenizer())
    assert task.score(task.prompt(0), (5000,)) == 0.0
    assert task.decode((5000,)) == ""


def test_stop_ids():
    assert exact_task(byte_tokenizer(), stop_ids=[7, 1]).stop_ids == (7, 1)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="stop_ids must be given for a tokenizer without an eos_token_id, got None"):
        exact_task(tokenizer)


def test_errors():
    with pytest.raises(ValueError, match="chat_template must be False for a tokenizer without .*, got True"):
        exact_task(byte_tokenizer(), chat_template=True)
    with pytest.raises(ValueError, match="size must be >= 1 or None, got 0"):
        exact_task(byte_tokenizer(), questions=())
    with pytest.raises(ValueError, match="token_ids must hold at least one token"):
        exact_task(byte_tokenizer(), questions=[("", "2")]).prompt(0)
