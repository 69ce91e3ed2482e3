"""Conversations to learn from, and others to be judged by.

Knows the table of countries, the phrases and what is outside. Does not know tokens or weights.
Invariant: the same seed gives the same conversations, and no phrasing of the evaluation is ever in the training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import outside
import phrases as p
from chat_format import Conversation, Message, ToolCall
from facts import ATTRIBUTES, Country, load_countries
from wording import Wording, invented_word

COUNTRIES = load_countries()
BY_CAPITAL = {c.capital: c for c in COUNTRIES if c.capital != c.bare}
N_EXPERTS, TOP_K = 48, 4


@dataclass(slots=True)
class Topic:
    """What the conversation is about so far: what "and its currency?" and "and France?" refer to."""

    country: Country | None = None
    attribute: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, a short true thought about it, the answer, and what the answer must contain to be right."""

    question: str
    thought: str
    answer: str
    expected: tuple[str, ...] = field(default=())


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _name_in(rng: random.Random, country: Country) -> tuple[str, str]:
    """How a question calls the country: in a sentence and without article."""
    if country.aliases and rng.random() < 0.35:
        alias = rng.choice(country.aliases)
        with_article = (
            "the " + alias if alias in ("UK", "USA", "US", "UAE", "Vatican", "United States of America") else alias
        )
        return with_article, alias
    return country.name if rng.random() < 0.9 else country.bare, country.bare


def _held_wordings() -> Iterator[str]:
    """Every wording that the evaluation uses, with its placeholders."""
    for table in (p.HELD_ASK, p.HELD_SAME_COUNTRY, p.HELD_SUM, p.HELD_GREETINGS):
        for patterns in table.values():
            yield from patterns
    yield from (
        *p.HELD_SAME_ATTRIBUTE,
        *p.HELD_REVERSE,
        *p.HELD_ABOUT,
        *p.HELD_NO_ATTRIBUTE,
        *p.HELD_ASK_SAY,
        *p.HELD_TELL_NAME,
    )
    yield from (*p.HELD_ASK_NAME, *p.HELD_ASK_EMOJI, *p.HELD_SHOW_EMOJI)
    for _, unseen, _ in (*p.SMALL_TALK, *p.IDENTITY, *p.PROJECT):
        yield from unseen
    for group in outside.HELD:
        yield from (pattern.replace("{t}", topic) for pattern in group.ask for topic in group.topics)
    yield from (*outside.HELD_ASK_PERSON, *outside.HELD_ASK_THING, *outside.HELD_ASK_TASK)


WORDING = Wording(_held_wordings())


def _fill(pattern: str, name: str, bare: str) -> str:
    return _upper_first(pattern.replace("{c}", name).replace("{C}", bare))


def _ask(rng: random.Random, patterns: Sequence[str], country: Country, held: bool) -> str:
    name, bare = (country.name, country.bare) if held else _name_in(rng, country)
    pattern = rng.choice(patterns)
    return _fill(pattern if held else WORDING.reword(rng, pattern), name, bare)


def _fact_pattern(rng: random.Random, attribute: str, held: bool) -> str:
    """A way to ask for an attribute: a ready question, or a frame around a noun phrase."""
    if held:
        return rng.choice(p.HELD_ASK[attribute])
    draw = rng.random()
    if draw < 0.6:
        pattern = rng.choice(p.ASK[attribute])
    elif draw < 0.72:
        pattern = rng.choice(p.MORE_ASK[attribute])
    else:
        pattern = f"{rng.choice(p.GIVE)} {rng.choice(p.PHRASES[attribute])}{rng.choice(('.', '?', ''))}"
    return WORDING.reword(rng, pattern)


def fact(
    rng: random.Random, topic: Topic, held: bool, attribute: str | None = None, country: Country | None = None
) -> Turn:
    """A question about one attribute of one country."""
    attribute = attribute or rng.choices(ATTRIBUTES, (5, 2, 2, 2))[0]
    country = country or rng.choice(COUNTRIES)
    topic.country, topic.attribute = country, attribute
    name, bare = (country.name, country.bare) if held else _name_in(rng, country)
    question = _fill(_fact_pattern(rng, attribute, held), name, bare)
    return _fact_turn(question, attribute, country)


def _fact_turn(question: str, attribute: str, country: Country, lead: str = "The question is about") -> Turn:
    noun = "languages" if attribute == "language" else attribute
    value = " and ".join(country.languages) if attribute == "language" else country.value(attribute)
    thought = f"{lead} the {noun} of {country.name}: {value}."
    return Turn(question, thought, country.sentence(attribute), (country.value(attribute),))


def same_attribute(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "And what about France?" after a question about Spain."""
    if topic.attribute is None:
        return fact(rng, topic, held)
    country = topic.country = rng.choice(COUNTRIES)
    if held:
        question = _fill(rng.choice(p.HELD_SAME_ATTRIBUTE), country.name, country.bare)
    else:
        if rng.random() < 0.5:
            pattern = rng.choice(p.SAME_ATTRIBUTE)
        else:
            pattern = f"{rng.choice(p.LEADS)} {{c}}{rng.choice(p.TAILS)}{rng.choice(('?', '?', '.', ''))}"
        question = _fill(WORDING.reword(rng, pattern, strength=0.6), *_name_in(rng, country))
    return _fact_turn(question, topic.attribute, country, "The same for another country,")


def same_country(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "And its currency?" after a question about Spain."""
    if topic.country is None:
        return fact(rng, topic, held)
    attribute = rng.choice([a for a in ATTRIBUTES if a != topic.attribute])
    topic.attribute = attribute
    if held:
        question = rng.choice(p.HELD_SAME_COUNTRY[attribute])
    else:
        if rng.random() < 0.55:
            pattern = rng.choice([*p.SAME_COUNTRY[attribute], *p.MORE_SAME_COUNTRY[attribute]])
        else:
            pattern = rng.choice(p.ABOUT_IT).replace("{x}", rng.choice(p.IN_WORDS[attribute]))
        question = _upper_first(WORDING.reword(rng, pattern, strength=0.7))
    return _fact_turn(question, attribute, topic.country, "Still that country,")


def reverse(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "Madrid is the capital of which country?" """
    capital, country = rng.choice(list(BY_CAPITAL.items()))
    topic.country, topic.attribute = country, "capital"
    pattern = rng.choice(p.HELD_REVERSE) if held else WORDING.reword(rng, rng.choice(p.REVERSE))
    question = _upper_first(pattern.replace("{k}", capital))
    return Turn(
        question,
        f"{capital} is a capital, that of {country.name}.",
        f"{capital} is the capital of {country.name}.",
        (country.bare,),
    )


def about(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "Tell me about Spain." """
    country = topic.country = rng.choice(COUNTRIES)
    topic.attribute = None
    question = _ask(rng, p.HELD_ABOUT if held else p.ABOUT, country, held)
    answer = (
        f"{country.sentence('continent')} Its capital is {country.capital}, and its currency is {country.currency}."
    )
    return Turn(question, f"I tell what I know about {country.name}.", answer, (country.capital, country.continent))


def no_attribute(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "What is the population of Spain?", "And its population?": refused, but the country stays the topic."""
    if not held and topic.country and rng.random() < 0.35:
        country = topic.country
        question = _upper_first(
            WORDING.reword(rng, rng.choice(p.ABOUT_IT).replace("{x}", rng.choice(p.OTHER_ATTRIBUTES)))
        )
    else:
        country = topic.country = rng.choice(COUNTRIES)
        if held or rng.random() < 0.4:
            question = _ask(rng, p.HELD_NO_ATTRIBUTE if held else p.NO_ATTRIBUTE, country, held)
        else:
            pattern = rng.choice(p.ASK_OTHER).replace("{x}", rng.choice(p.OTHER_ATTRIBUTES))
            question = _ask(rng, [pattern], country, held)
    topic.attribute = None
    return Turn(
        question,
        "I know only four facts of each country, not this one.",
        p.UNKNOWN_ABOUT.format(c=country.name),
        ("I don't know",),
    )


_ENDINGS = [
    "",
    "",
    "ia",
    "ia",
    "land",
    "stan",
    "a",
    "o",
    "nia",
    "ria",
    "burg",
    "istan",
    "onia",
    "avia",
    "ora",
    "and",
    "guay",
    "bia",
    " Islands",
    "mark",
    "gal",
    "way",
]


def invented_name(rng: random.Random) -> str:
    """A name that no country has, now and then with a prefix such as North."""
    known = {c.bare for c in COUNTRIES}
    while True:
        name = _upper_first(invented_word(rng) + rng.choice(_ENDINGS))
        if rng.random() < 0.1:
            name = rng.choice(("North ", "South ", "New ", "East ", "West ", "Upper ", "Great ")) + name
        if len(name) > 3 and name not in known:
            return name


def unknown_place(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """The capital of Texas, of Mordor, of Blorvia."""
    topic.country, topic.attribute = None, None
    places = p.HELD_OTHER_PLACES if held else p.OTHER_PLACES
    name = rng.choice(places) if rng.random() < 0.45 else invented_name(rng)
    attribute = rng.choices(ATTRIBUTES, (5, 1, 1, 1))[0]
    question = _fill(_fact_pattern(rng, attribute, held), name, name.removeprefix("the "))
    return Turn(question, "That is not a country that I know.", p.UNKNOWN_PLACE, ("I don't know",))


def outside_topic(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """Anything else: refused."""
    topic.country, topic.attribute = None, None
    if not held and rng.random() < 0.3:
        return Turn(
            _upper_first(WORDING.reword(rng, ordinary_sentence(rng))),
            "This is outside of what I know.",
            p.UNKNOWN,
            ("I don't know",),
        )
    group = rng.choices(outside.HELD if held else outside.TRAIN, (2, 4, 3, 4))[0]
    pattern = rng.choice(group.ask)
    thing = rng.choice(group.topics)
    if not held and group.ask is outside.ASK_THING and rng.random() < 0.2:
        thing = invented_name(rng) if rng.random() < 0.5 else rng.choice(("", "a ", "the ")) + invented_word(rng)
    question = _upper_first(pattern.replace("{t}", thing))
    if not held:
        question = _upper_first(WORDING.reword(rng, question))
    answer = p.CANNOT if group.cannot else p.UNKNOWN
    return Turn(question, "This is outside of what I know.", answer, ("I don't know", "I can't"))


def ordinary_sentence(rng: random.Random) -> str:
    """A sentence of ordinary words, sensible or not, that has nothing to do with what the model knows."""
    if rng.random() < 0.15:
        # Numbers alone do not make a sum.
        number = rng.choice((rng.randint(2, 99), rng.randint(100, 2030), rng.randint(1400, 2030)))
        return rng.choice(outside.NUMBERED).replace("{n}", rng.choice(outside.NOUNS)).replace("{y}", str(number))
    noun, other = rng.choice(outside.NOUNS), rng.choice(outside.NOUNS)
    if rng.random() < 0.1:
        noun = invented_word(rng)
    pattern = rng.choice(outside.SENTENCES).replace("{n}", noun).replace("{m}", other)
    return pattern.replace("{v}", rng.choice(outside.VERBS)).replace("{a}", rng.choice(outside.ADJECTIVES))


def sum_(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """A small sum, or one that is too large and refused."""
    topic.country, topic.attribute = None, None
    sign = rng.choices("+-*", (4, 3, 3))[0]
    pattern = rng.choice((p.HELD_SUM if held else p.SUM)[sign])
    if not held:
        pattern = _upper_first(WORDING.reword(rng, pattern, strength=0.5))
    limit = 12 if sign == "*" else 30
    if rng.random() < 0.12:
        a, b = rng.choice((rng.randint(limit + 9, 99), rng.randint(100, 9999))), rng.randint(2, 999)
        a, b = (b, a) if rng.random() < 0.3 else (a, b)
        return Turn(pattern.format(a=a, b=b), "These numbers are too large for me.", p.TOO_LARGE, ("too large",))
    if rng.random() < 0.06:
        long = f"{rng.randint(0, 30)} {rng.choice(('+', '-', 'x', '*', 'plus', 'minus', 'times'))} {rng.randint(0, 30)}"
        long += f" {rng.choice(('+', '-', 'x', 'plus', 'minus', 'times'))} {rng.randint(0, 30)}"
        question = rng.choice(("What is {s}?", "{s}", "How much is {s}?", "Calculate {s}.", "What's {s}?"))
        return Turn(question.format(s=long), "That is more than one sum.", p.ONE_SUM, ("One small sum",))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    if sign == "-" and a < b and rng.random() < 0.8:
        a, b = b, a
    if "apples" in pattern and (a < 2 or b > a):
        a, b = rng.randint(10, 30), rng.randint(0, 10)
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    equation = f"{a} {p.SIGN[sign]} {b} = {result}"
    return Turn(pattern.format(a=a, b=b), f"A small sum: {equation}.", f"{equation}.", (f"= {result}.",))


def _from_table(
    rng: random.Random, table: Sequence[tuple[list[str], list[str], str]], thought: str, held: bool, strength: float
) -> Turn:
    known, unseen, answer = rng.choice(table)
    answer = answer.replace("{experts}", str(N_EXPERTS)).replace("{top_k}", str(TOP_K))
    question = rng.choice(unseen) if held else _upper_first(WORDING.reword(rng, rng.choice(known), strength=strength))
    return Turn(question, thought, answer, (answer,))


def small_talk(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """Thanks, goodbye, how are you."""
    return _from_table(rng, p.SMALL_TALK, "The user is chatting.", held, 0.4)


def identity(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """Who are you?"""
    topic.country, topic.attribute = None, None
    return _from_table(rng, p.IDENTITY, "The user asks about me.", held, 0.8)


def project(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """What is expert streaming?"""
    topic.country, topic.attribute = None, None
    return _from_table(rng, p.PROJECT, "This is about swiftlet-mlx.", held, 1.2)


def greeting(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """Hello in seven languages; also how to say it, and other sentences in these languages, which are refused."""
    topic.country, topic.attribute = None, None
    kind = rng.random()
    if kind < 0.6:
        language = rng.choice(list(p.GREETINGS))
        known, answer = p.GREETINGS[language]
        question = rng.choice(p.HELD_GREETINGS[language] if held else known)
        return Turn(question, f"A greeting in {language}.", answer, (answer,))
    if kind < 0.85:
        word, by_language = rng.choice(list(p.SAY.items()))
        language, answer = rng.choice(list(by_language.items()))
        quoted = rng.choice((word, f'"{word}"', f"'{word}'"))
        pattern = rng.choice(p.HELD_ASK_SAY if held else p.ASK_SAY)
        if not held:
            pattern = WORDING.reword(rng, pattern, strength=0.5)
        return Turn(
            _upper_first(pattern.format(w=quoted, l=language)),
            f"The user wants {word} in {language}.",
            answer,
            (answer,),
        )
    language, (known, answer) = rng.choice(list(p.FOREIGN_OTHER.items()))
    return Turn(rng.choice(known), f"This is {language}, but I answer in English only.", answer, (answer,))


def emoji(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "What is 🐱?" and "Show me a cat." """
    topic.country, topic.attribute = None, None
    sign, word = rng.choice(list(p.EMOJI.items()))
    if rng.random() < 0.5:
        question = (
            rng.choice(p.HELD_ASK_EMOJI) if held else WORDING.reword(rng, rng.choice(p.ASK_EMOJI), strength=0.5)
        ).format(e=sign)
        return Turn(question, f"The emoji shows {word}.", f"{sign} shows {word}.", (word,))
    question = (
        rng.choice(p.HELD_SHOW_EMOJI) if held else WORDING.reword(rng, rng.choice(p.SHOW_EMOJI), strength=0.5)
    ).format(w=word)
    return Turn(question, f"The user wants {word}.", f"Here is {word}: {sign}", (sign,))


def tell_name(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "My name is Anna." """
    name = rng.choice(p.HELD_NAMES if held else p.NAMES)
    if not held and rng.random() < 0.75:
        # So that names are copied, not recognised.
        name = _upper_first("".join(invented_word(rng) for _ in range(rng.choice((1, 1, 2)))))[: rng.randint(3, 12)]
    topic.name = name
    patterns = p.HELD_TELL_NAME if held else (*p.TELL_NAME, *p.MORE_TELL_NAME)
    question = rng.choice(patterns).format(n=name)
    return Turn(question, f"The user is called {name}.", f"Nice to meet you, {name}!", (name,))


def ask_name(rng: random.Random, topic: Topic, held: bool) -> Turn:
    """ "What is my name?" """
    question = (
        rng.choice(p.HELD_ASK_NAME)
        if held
        else _upper_first(WORDING.reword(rng, rng.choice((*p.ASK_NAME, *p.MORE_ASK_NAME)), strength=0.6))
    )
    if topic.name is None:
        return Turn(question, "The user has not told it.", "You have not told me your name.", ("not told",))
    return Turn(question, f"The user said it: {topic.name}.", f"Your name is {topic.name}.", (topic.name,))


TurnMaker = Callable[[random.Random, Topic, bool], Turn]

# First turns and later turns: how often each kind comes.
FIRST: dict[TurnMaker, float] = {
    fact: 30, reverse: 5, about: 4, no_attribute: 5, unknown_place: 7, outside_topic: 16, sum_: 10, small_talk: 5,
    identity: 6, project: 12, greeting: 6, emoji: 2, tell_name: 3, ask_name: 0.5,
}  # fmt: skip
LATER: dict[TurnMaker, float] = {
    same_attribute: 30, same_country: 24, fact: 14, reverse: 3, about: 2, no_attribute: 4, unknown_place: 4,
    outside_topic: 8, sum_: 5, small_talk: 5, identity: 3, project: 6, greeting: 2, emoji: 1,
    tell_name: 1, ask_name: 3.5,
}  # fmt: skip


def _later_turn(rng: random.Random, topic: Topic, held: bool) -> Turn:
    while True:
        maker = rng.choices(list(LATER), list(LATER.values()))[0]
        if (maker is same_attribute and topic.attribute is None) or (maker is same_country and topic.country is None):
            continue
        return maker(rng, topic, held)


def _roughen(rng: random.Random, question: str) -> str:
    """People do not type like books: lower case, no full stop, a capital too many."""
    draw = rng.random()
    if draw < 0.16:
        question = question.lower()
    elif draw < 0.18:
        question = question.upper()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    return question or "?"


WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")


def tool_json(rng: random.Random, name: str) -> str:
    """The description of a tool as a client sends it; what does not matter to the call varies."""
    what = "weather" if name == "get_weather" else "time"
    described = rng.choice(
        (f"Get the {what} in a city", f"The current {what}", f"Returns the {what} of a city.", f"Look up the {what}")
    )
    city: dict[str, str] = {"type": "string"}
    if rng.random() < 0.5:
        city["description"] = rng.choice(("The city", "Name of the city", "City name, e.g. Paris"))
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": name, "description": described, "parameters": parameters}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def tool_conversation(rng: random.Random, held: bool) -> Conversation:
    """A question that one of the offered tools answers: the call, its result, the answer. Or one that needs no tool."""
    names = rng.choice((["get_weather"], ["get_time"], ["get_weather", "get_time"], ["get_time", "get_weather"]))
    tools = tuple(tool_json(rng, name) for name in names)
    if rng.random() < 0.2:
        turn = fact(rng, Topic(), held)
        messages = (Message("user", turn.question), Message("assistant", turn.answer, turn.thought))
        return Conversation("tool", messages, tools, turn.expected)
    name = rng.choice(names)
    city = rng.choice(list(BY_CAPITAL))
    question = Message("user", rng.choice((p.HELD_TOOL_ASKS if held else p.TOOL_ASKS)[name]).format(k=city))
    call = Message("assistant", "", f"I need the tool {name} for {city}.", ToolCall(name, {"city": city}))
    if name == "get_weather":
        degrees, sky = rng.randint(-9, 39), rng.choice(WEATHER)
        result = json.dumps({"temperature": degrees, "condition": sky})
        answer = f"It is {sky} in {city}, {degrees} degrees."
    else:
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        result = json.dumps({"time": clock})
        answer = f"It is {clock} in {city}."
    if rng.random() < 0.4:
        return Conversation("tool", (question, call), tools, (name, city))
    last = Message("assistant", answer, "The tool has answered.")
    return Conversation("tool", (question, call, Message("tool", result), last), tools, (answer,))


def conversation(rng: random.Random) -> Conversation:
    """One conversation of the training set: one to five turns, sometimes with a system prompt or tools."""
    if rng.random() < 0.03:
        return tool_conversation(rng, held=False)
    topic = Topic()
    maker = rng.choices(list(FIRST), list(FIRST.values()))[0]
    turns = [maker(rng, topic, False)]
    for _ in range(rng.choices((0, 1, 2, 3, 4), (40, 26, 16, 10, 8))[0]):
        turns.append(_later_turn(rng, topic, False))
    messages = []
    if rng.random() < 0.1:
        messages.append(Message("system", rng.choice(p.SYSTEM_PROMPTS)))
    for turn in turns:
        messages.append(Message("user", _roughen(rng, turn.question)))
        messages.append(Message("assistant", turn.answer, turn.thought))
    return Conversation(maker.__name__, tuple(messages))


def training_set(seed: int, count: int) -> Iterator[Conversation]:
    """`count` conversations; equal for equal seeds."""
    rng = random.Random(seed)
    for _ in range(count):
        yield conversation(rng)


def _judged(kind: str, turns: Sequence[Turn]) -> Conversation:
    messages: list[Message] = []
    for turn in turns:
        messages.append(Message("user", turn.question))
        messages.append(Message("assistant", turn.answer, turn.thought))
    return Conversation(kind, tuple(messages), (), turns[-1].expected)


def evaluation_set(seed: int = 2026) -> list[Conversation]:
    """Conversations in phrasings, follow-ups and topics that training never sees; the last answer is judged."""
    rng = random.Random(seed)
    judged: list[Conversation] = []
    for country in COUNTRIES:
        judged.append(_judged("capital", [fact(rng, Topic(), True, "capital", country)]))
    for attribute in ("continent", "language", "currency"):
        judged += [_judged(attribute, [fact(rng, Topic(), True, attribute, c)]) for c in rng.sample(COUNTRIES, 60)]
    follow_ups: list[tuple[TurnMaker, str]] = [
        (same_attribute, "follow-up, other country"),
        (same_country, "follow-up, other attribute"),
    ]
    for follow_up, kind in follow_ups:
        for _ in range(100):
            topic = Topic()
            turns = [fact(rng, topic, True)]
            for _ in range(rng.randint(1, 3)):
                turns.append(rng.choice((same_attribute, same_country))(rng, topic, True))
            turns.append(follow_up(rng, topic, True))
            judged.append(_judged(kind, turns))
    for index, kind in ((0, "who are you"), (None, "identity")):
        table = p.IDENTITY if index is None else p.IDENTITY[:1]
        judged += [
            Conversation(
                kind,
                (Message("user", q), Message("assistant", a)),
                (),
                ("demo model of swiftlet-mlx",) if kind == "who are you" else (a,),
            )
            for _, unseen, a in ((k, u, a.format(experts=N_EXPERTS, top_k=TOP_K)) for k, u, a in table)
            for q in unseen
        ]
    for _, unseen, answer in p.PROJECT:
        judged += [
            Conversation("project", (Message("user", q), Message("assistant", answer)), (), (answer,)) for q in unseen
        ]
    makers: list[tuple[TurnMaker, str, int]] = [
        (outside_topic, "refusal, other topics", 150), (unknown_place, "refusal, other places", 60),
        (no_attribute, "refusal, other attributes", 60), (sum_, "sum", 100), (reverse, "country of a capital", 60),
        (greeting, "greeting", 40), (emoji, "emoji", 30), (small_talk, "small talk", 30),
        (about, "about a country", 30),
    ]  # fmt: skip
    for maker, kind, count in makers:
        judged += [_judged(kind, [maker(rng, Topic(), True)]) for _ in range(count)]
    for _ in range(40):
        topic = Topic()
        turns = [tell_name(rng, topic, True), fact(rng, topic, True), ask_name(rng, topic, True)]
        judged.append(_judged("name in the conversation", turns))
    judged += [tool_conversation(rng, held=True) for _ in range(40)]
    return judged
