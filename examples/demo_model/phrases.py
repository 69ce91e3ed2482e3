"""How people ask, and what the model answers, where the answer does not come from the table of countries.

Data only. Each list that asks has a second one for the evaluation, `HELD_*`, which training never sees.
Placeholders: {c} a country as sentences say it, {C} the same without its article, {t} a topic, {a} and {b} numbers,
{n} a name, {l} a language. Everything here was written for this project (CC0).
"""

# ruff: noqa: E501, SIM905
# fmt: off
from __future__ import annotations

# --- Facts about countries -------------------------------------------------------------------------------------

ASK: dict[str, list[str]] = {
    "capital": [
        "What is the capital of {c}?",
        "What's the capital of {c}?",
        "What is the capital city of {c}?",
        "Which city is the capital of {c}?",
        "Which city is {C}'s capital?",
        "What is {C}'s capital?",
        "What city is the capital of {c}?",
        "Capital of {c}?",
        "Capital of {c}",
        "The capital of {c}?",
        "The capital of {c} is?",
        "The capital of {c}, please.",
        "{C} capital",
        "{C}: capital?",
        "{C}'s capital?",
        "Tell me the capital of {c}.",
        "Tell me {C}'s capital.",
        "Name the capital of {c}.",
        "Name {C}'s capital city.",
        "Do you know the capital of {c}?",
        "Do you know {C}'s capital?",
        "Do you know which city is the capital of {c}?",
        "Can you tell me the capital of {c}?",
        "Can you tell me what the capital of {c} is?",
        "Could you tell me the capital of {c}?",
        "I want to know the capital of {c}.",
        "I need the capital of {c}.",
        "I am looking for the capital of {c}.",
        "What is the name of the capital of {c}?",
        "What is the capital called in {c}?",
        "How is the capital of {c} called?",
        "Give me the capital of {c}.",
        "Say the capital of {c}.",
        "{c}, what is the capital?",
        "What is the capital in {c}?",
        "Which city has the government of {c}?",
        "Where is the capital of {c}?",
        "Which one is the capital of {c}?",
        "Let me know the capital of {c}.",
        "In {c}, which city is the capital?",
        "My homework asks for the capital of {c}.",
        "I forgot the capital of {c}. What is it?",
        "If I go to {c}, which city is the capital?",
        "Remind me: the capital of {c}?",
        "What would be the capital of {c}?",
        "Which capital does {c} have?",
        "What capital city does {c} have?",
        "Help me with the capital of {c}.",
    ],
    "continent": [
        "Which continent is {c} in?",
        "Which continent is {c} on?",
        "What continent is {c} in?",
        "On which continent is {c}?",
        "In which continent is {c}?",
        "Where is {c}?",
        "Where is {c} located?",
        "Where in the world is {c}?",
        "Where can I find {c}?",
        "In what part of the world is {c}?",
        "Continent of {c}?",
        "{C} continent",
        "{C}'s continent?",
        "Tell me the continent of {c}.",
        "Tell me where {c} is.",
        "What is the continent of {c}?",
        "Name the continent of {c}.",
        "Do you know where {c} is?",
        "Do you know the continent of {c}?",
        "Can you tell me where {c} is?",
        "To which continent does {c} belong?",
        "What continent does {c} belong to?",
        "{c} is on which continent?",
        "I want to know where {c} is.",
        "I need the continent of {c}.",
        "Where would I find {c} on a map?",
        "Where does {c} lie?",
        "Which part of the world is {c} in?",
    ],
    "language": [
        "What language is spoken in {c}?",
        "What languages are spoken in {c}?",
        "Which language do people speak in {c}?",
        "Which languages do they speak in {c}?",
        "What language do they speak in {c}?",
        "What do people speak in {c}?",
        "What is the language of {c}?",
        "What is the main language of {c}?",
        "What are the main languages of {c}?",
        "What is the official language of {c}?",
        "What is {C}'s language?",
        "Language of {c}?",
        "Languages of {c}",
        "{C} language",
        "{C}'s languages?",
        "Tell me the language of {c}.",
        "Tell me which language is spoken in {c}.",
        "Name the language of {c}.",
        "Do you know the language of {c}?",
        "Do you know what they speak in {c}?",
        "Can you tell me the language of {c}?",
        "Which language is used in {c}?",
        "In {c}, what language do people speak?",
        "I want to know the language of {c}.",
        "I need the language of {c}.",
        "How do people talk in {c}?",
        "Which language should I learn for {c}?",
        "I travel to {c}. Which language is spoken there?",
    ],
    "currency": [
        "What is the currency of {c}?",
        "What's the currency of {c}?",
        "What currency does {c} use?",
        "Which currency is used in {c}?",
        "Which currency do they use in {c}?",
        "What money do they use in {c}?",
        "What money is used in {c}?",
        "What is {C}'s currency?",
        "Currency of {c}?",
        "Currency in {c}",
        "{C} currency",
        "{C}'s currency?",
        "Tell me the currency of {c}.",
        "Tell me what money they use in {c}.",
        "Name the currency of {c}.",
        "Do you know the currency of {c}?",
        "Do you know what money {c} uses?",
        "Can you tell me the currency of {c}?",
        "What is the money of {c} called?",
        "How do I pay in {c}?",
        "What do people pay with in {c}?",
        "With which currency do you pay in {c}?",
        "I want to know the currency of {c}.",
        "I need the currency of {c}.",
        "Which money do I need in {c}?",
        "In {c}, what is the currency?",
        "I travel to {c}. Which currency do I need?",
    ],
}

# Noun phrases, to be asked for in every frame.
PHRASES: dict[str, list[str]] = {
    "capital": ["the capital of {c}", "{C}'s capital", "the capital city of {c}", "{C}'s capital city", "the city that is the capital of {c}",
                "the name of {C}'s capital", "the capital in {c}", "the seat of the government of {c}", "the main city of the government in {c}"],
    "continent": ["the continent of {c}", "{C}'s continent", "the part of the world where {c} is", "the place of {c} on the map",
                  "the continent that {c} belongs to", "the continent where {c} lies", "where {c} is", "the location of {c}", "the region of {c}"],
    "language": ["the language of {c}", "{C}'s main language", "the language spoken in {c}", "the languages people use in {c}", "the tongue of {c}",
                 "the main language in {c}", "what they speak in {c}", "the languages of {c}", "the official language of {c}", "{C}'s mother tongue"],
    "currency": ["the currency of {c}", "{C}'s money", "the money of {c}", "the currency used in {c}", "the money people pay with in {c}",
                 "{C}'s currency", "the name of the money in {c}", "the cash used in {c}", "the coins and notes of {c}", "the currency people use in {c}"],
}
MORE_ASK: dict[str, list[str]] = {
    "capital": ["Which city do they call the capital in {c}?", "Is there a capital of {c}?", "What city is the seat of government of {c}?",
                "Does {c} have a capital?", "What serves as {C}'s capital?"],
    "continent": ["Where is {c} situated?", "On what continent would I find {c}?", "Where on Earth is {c}?", "Is {c} in Europe or elsewhere?",
                  "{c} belongs to which continent?", "What continent has {c}?", "Which continent does {c} lie in?", "{c} is where?"],
    "language": ["What would I hear people speak in {c}?", "Which tongue do people use in {c}?", "People in {c} speak what?", "What is spoken in {c}?",
                 "What language would I hear in {c}?", "Which words do people in {c} use, of which language?"],
    "currency": ["People in {c} pay with what?", "What do I pay with in {c}?", "Which coins do I need in {c}?", "What cash do they take in {c}?",
                 "Which currency do people pay with in {c}?", "{c} uses which currency?", "What currency is it in {c}?"],
}

HELD_ASK: dict[str, list[str]] = {
    "capital": [
        "Could you name {C}'s capital city for me?",
        "I'd like to know which city is the capital of {c}.",
        "Please tell me what city serves as the capital of {c}.",
        "For {c}, what is the capital?",
        "What do they call the capital of {c}?",
        "Would you happen to know the capital of {c}?",
    ],
    "continent": [
        "Could you say which continent {c} belongs to?",
        "I'd like to know on what continent {c} lies.",
        "{c} lies on which continent?",
    ],
    "language": [
        "I'd like to know what people in {c} speak.",
        "Could you name the main language of {c} for me?",
        "Which tongue is spoken in {c}?",
    ],
    "currency": [
        "Could you name the currency used in {c}?",
        "I'd like to know what currency people in {c} pay with.",
        "For {c}, which currency is it?",
    ],
}

CLOSERS = ["", "", "", "", "", "", "", " Thanks.", " Please.", " Thank you!", " I am curious.", " Just wondering."]

SAME_ATTRIBUTE = [
    "And what about {c}?",
    "And {c}?",
    "And of {c}?",
    "And in {c}?",
    "What about {c}?",
    "How about {c}?",
    "And how about {c}?",
    "{c}?",
    "Now {c}.",
    "And now {c}?",
    "And now for {c}",
    "Same for {c}?",
    "The same for {c}, please.",
    "The same question for {c}.",
    "Now the same for {c}.",
    "Next: {c}",
    "Then {c}?",
    "What is it for {c}?",
    "And that of {c}?",
    "Also {c}?",
    "Ok, what about {c}?",
    "And what is it in {c}?",
    "Do you know it for {c}, too?",
    "Let's try {c}.",
]
LEADS = ["And", "And what about", "What about", "How about", "And how about", "Now", "And now", "And now for", "Then", "And then", "Next", "Next,", "Also",
         "Same for", "The same for", "Now the same for", "Ok,", "Okay, and", "Fine, and", "But what about", "So what about", "Do", "Please do", "Now do",
         "Try", "Switch to", "I also want", "I would like", "Can you do", "Do you know", "Tell me for", "Do it for", "Say it for", "What is it for",
         "What is it in", "And that of", "What's that for", "And with", "And over in", "What if I take", "Let's take", "Well, and", "Go on with", "Continue with",
         "And again for", "One more:", "Another:", "What do you say for", "I meant", "No, I meant", "Sorry, I meant", "Good, and"]  # fmt: skip
TAILS = ["", "", "", "", " then", ", please", " now", ", too", " this time", " instead", " next", " also", " maybe", " for me"]

HELD_SAME_ATTRIBUTE = ["And for {c}?", "Alright, and what about {c} then?", "What of {c}?", "Could you do {c} as well?"]

SAME_COUNTRY: dict[str, list[str]] = {
    "capital": [
        "And its capital?", "And the capital?", "What is its capital?", "What is the capital?", "And what is its capital?",
        "Which city is its capital?", "The capital?", "What about the capital?", "And the capital there?", "Its capital, please.",
        "What's the capital there?", "Do you know its capital?", "Tell me its capital, too.", "And the capital city?",
    ],
    "continent": [
        "And where is it?", "Where is it?", "Which continent is it on?", "And its continent?", "And the continent?",
        "On which continent is it?", "What continent is that?", "Where is that?", "And where is that country?",
        "Where is that country?", "What about its continent?", "In which part of the world is it?",
    ],
    "language": [
        "And its language?", "And the language?", "What language do they speak there?", "What do they speak there?",
        "Which language is spoken there?", "And what language do people speak there?", "What is its language?",
        "What about the language?", "And the main language?", "Which languages do they speak?", "What is the language there?",
    ],
    "currency": [
        "And its currency?", "And the currency?", "What is its currency?", "What money do they use there?",
        "Which currency do they use?", "What about its currency?", "What about the currency?", "And what money do they use?",
        "How do I pay there?", "What is the currency there?", "Which money do I need there?",
    ],
}
# "And" in front, "there" behind: {x} is the attribute in words.
ABOUT_IT = ["And its {x}?", "And the {x}?", "What about its {x}?", "What about the {x}?", "And what is its {x}?", "And what is the {x} there?", "Its {x}?",
            "The {x} there?", "Tell me its {x}.", "And tell me the {x}.", "Now the {x}.", "Now its {x}, please.", "What is the {x} of that country?",
            "And do you know its {x}?", "Which {x} does it have?", "And which {x} is that?", "I also need the {x}.", "{x}?", "And {x}?", "Also the {x}, please.",
            "What would the {x} be?", "And what would the {x} be there?", "Give me its {x}, too.", "How about its {x}?", "Then what is the {x}?"]  # fmt: skip
IN_WORDS: dict[str, list[str]] = {
    "capital": ["capital", "capital city", "seat of government"],
    "continent": ["continent", "part of the world", "region", "place on the map"],
    "language": ["language", "main language", "languages", "tongue", "official language"],
    "currency": ["currency", "money", "cash", "coins"],
}
MORE_SAME_COUNTRY: dict[str, list[str]] = {
    "capital": ["Which city is the capital there?", "What is their capital?", "And which city is the capital of that country?"],
    "continent": ["On what continent is that country?", "Where does it lie?", "And where does that country lie?", "Where would I find it?", "In what part of the world is that?"],
    "language": ["What would I hear people speak there?", "And what do people speak there?", "Which language would I need there?", "What do they speak?", "How do they talk there?"],
    "currency": ["What do they pay with there?", "And what would I pay with there?", "How do they pay there?", "What money do people have there?", "And which money is used there?"],
}
HELD_SAME_COUNTRY: dict[str, list[str]] = {
    "capital": ["And what would its capital be?", "Which is the capital city there?"],
    "continent": ["And on what continent does it lie?", "What part of the world is that in?"],
    "language": ["And which language would I hear there?", "What do people there speak?"],
    "currency": ["And what do people there pay with?", "What currency is used there?"],
}

REVERSE = [
    "{k} is the capital of which country?", "Which country has {k} as its capital?", "Of which country is {k} the capital?",
    "What country is {k} the capital of?", "{k} is the capital of what?", "Whose capital is {k}?", "In which country is {k}?",
    "Where is {k}?", "Which country does {k} belong to?", "What is {k}?", "Tell me about {k}.", "{k} is in which country?",
]
HELD_REVERSE = ["{k} is the capital city of what country?", "Which country's capital is {k}?"]

ABOUT = ["Which facts do you know of {c}?", "What facts do you have about {c}?", "Give me facts about {c}.", "Give me some facts on {c}.", "Talk about {c}.", "Say what you know about {c}.",
         "Explain {c}.", "What is {c}?", "I want to learn about {c}.", "Your knowledge of {c}?", "All you know about {c}, please.", "What is there to know about {c}?", "Tell me about {c}.", "What do you know about {c}?", "{C}", "Describe {c}.", "Facts about {c}?", "Do you know {c}?",
         "Tell me something about {c}.", "What can you tell me about {c}?", "Information on {c}, please."]
HELD_ABOUT = ["Say something about {c}.", "What are your facts about {c}?"]

NO_ATTRIBUTE = [
    "What is the population of {c}?", "How many people live in {c}?", "Who is the president of {c}?", "Who rules {c}?",
    "What is the largest city of {c}?", "What is the highest mountain in {c}?", "What is the longest river in {c}?",
    "What is the national dish of {c}?", "What is the national anthem of {c}?", "What is the weather like in {c}?",
    "How big is {c}?", "What is the area of {c}?", "When was {c} founded?", "What is the history of {c}?",
    "Which football club is the best in {c}?", "How do I get a visa for {c}?", "Which animals live in {c}?",
    "What are the neighbours of {c}?", "Which countries border {c}?", "What is the flag of {c}?", "What is the religion of {c}?",
    "Who is the king of {c}?", "What is the climate of {c}?", "How rich is {c}?", "What is the time in {c}?",
    "Is {c} worth a visit?", "What should I see in {c}?", "Who is the prime minister of {c}?", "What do people eat in {c}?",
    "When did {c} become independent?", "How safe is {c}?", "What is the phone code of {c}?", "How far is {c}?",
    "What is a famous book from {c}?", "Who is a famous singer from {c}?", "How do I fly to {c}?", "What are good hotels in {c}?",
]
# Nouns for "What is the {x} of {c}?" and "And its {x}?", refused.
OTHER_ATTRIBUTES = (
    "population, president, prime minister, king, queen, ruler, leader, largest city, second city, highest "
    "mountain, longest river, deepest lake, national dish, national anthem, flag, weather, climate, size, area, "
    "history, best football club, religion, economy, army, airline, airport, phone code, time zone, national "
    "animal, national flower, neighbours, border, coast, biggest company, main export, main import, main crop, "
    "oldest town, favourite sport, most famous singer, most famous book, most famous building, unemployment rate, "
    "gross product, birth rate, life expectancy, independence day, constitution, parliament, police, railway, "
    "tallest building, wine, cheese, music, cinema, literature, school system, health system, tax rate, motto, "
    "name, nickname, internet code, postal code, driving side, visa rules, tourist season, nicest beach, biggest "
    "festival, rainfall, temperature"
).split(", ")
ASK_OTHER = ["What is the {x} of {c}?", "What's {C}'s {x}?", "{C} {x}", "The {x} of {c}?", "What is the {x} in {c}?", "Which {x} does {c} have?", "How is the {x} in {c}?",
             "What do you know about the {x} of {c}?", "{x} of {c}"]

HELD_NO_ATTRIBUTE = ["How tall are people in {c}?", "What does {c} export?", "Which lake is the deepest in {c}?",
                     "Who won the last election in {c}?", "What sports are popular in {c}?"]

OTHER_PLACES = [
    "Texas", "California", "Bavaria", "Scotland", "Wales", "Catalonia", "Sicily", "Ontario", "Quebec", "Queensland", "Florida",
    "Siberia", "Tuscany", "Hokkaido", "Kerala", "Alaska", "Hawaii", "Saxony", "Brittany", "Crete", "Corsica", "Atlantis",
    "Narnia", "Wakanda", "Mordor", "Middle-earth", "Mars", "the Moon", "Jupiter", "Europe", "Africa", "Asia", "Antarctica",
    "Prussia", "Yugoslavia", "the Soviet Union", "Gondor", "Hogwarts", "Westeros", "Elbonia", "New York", "Chicago", "the sea",
]
HELD_OTHER_PLACES = ["Ohio", "Normandy", "Arizona", "Venus", "Genovia", "Tasmania", "Andalusia", "Lilliput"]

# --- Sums --------------------------------------------------------------------------------------------------------

SUM: dict[str, list[str]] = {
    "+": ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=?", "What is {a} plus {b}?", "{a} plus {b}?",
          "How much is {a} plus {b}?", "How much is {a} + {b}?", "Add {a} and {b}.", "Add {b} to {a}.", "What do {a} and {b} make?", "How many are {a} and {b}?",
          "{a} and {b} together?", "{a} and {b} make how many?", "Work out {a} plus {b}.", "Put {a} and {b} together.", "What is {a} and {b} together?", "{a} plus {b} makes?", "Calculate {a} + {b}.", "What's {a} + {b}?",
          "Compute {a} plus {b}.", "What is the sum of {a} and {b}?", "Can you add {a} and {b}?", "Tell me {a} + {b}.",
          "I have {a} apples and get {b} more. How many do I have?"],
    "-": ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a}-{b}=?", "What is {a} minus {b}?", "{a} minus {b}?",
          "How much is {a} minus {b}?", "How much is {a} - {b}?", "Subtract {b} from {a}.", "Take {b} from {a}.", "What remains of {a} after {b} are gone?", "What is left of {a} without {b}?", "{a} less {b}?",
          "Work out {a} minus {b}.", "How much is left of {a} after losing {b}?", "{a} minus {b} makes?", "How many remain if I take {b} from {a}?", "Calculate {a} - {b}.",
          "What's {a} - {b}?", "Compute {a} minus {b}.", "Take {b} away from {a}.", "Tell me {a} - {b}.",
          "I have {a} apples and give away {b}. How many are left?"],
    "*": ["What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} × {b} =", "What is {a} times {b}?", "{a} times {b}?",
          "How much is {a} times {b}?", "How much is {a} × {b}?", "Multiply {a} by {b}.", "What is {a} multiplied by {b}?", "{a} multiplied by {b}?", "Work out {a} times {b}.", "{a} times {b} makes?", "Multiplied, what are {a} and {b}?", "Multiply {a} and {b}.",
          "Calculate {a} * {b}.", "What's {a} x {b}?", "Compute {a} times {b}.", "What is the product of {a} and {b}?"],
}
HELD_SUM: dict[str, list[str]] = {
    "+": ["Could you work out {a} + {b}?", "{a} plus {b} is what?", "How many are {a} and {b} together?"],
    "-": ["Could you work out {a} - {b}?", "{a} minus {b} is what?", "How much remains of {a} after taking {b}?"],
    "*": ["Could you work out {a} * {b}?", "{a} times {b} is what?", "How much is {a} multiplied by {b}?"],
}
SIGN = {"+": "+", "-": "-", "*": "×"}
TOO_LARGE = "That is too large for me. I add and subtract numbers up to 30 and multiply up to 12."

ONE_SUM = "One small sum at a time, please: I add, subtract or multiply two numbers."

# --- Greetings ---------------------------------------------------------------------------------------------------

GREETINGS: dict[str, tuple[list[str], str]] = {
    "English": (["Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hey!", "Good morning", "Good morning!", "Good evening",
                 "Good afternoon", "Hello there!", "Greetings", "Hi 👋", "Hello, demo!", "Good day", "👋"],
                "Hello! 👋 I am the demo model of swiftlet-mlx. Ask me about countries, small sums or swiftlet-mlx."),
    "Korean": (["안녕하세요", "안녕하세요!", "안녕", "안녕!", "안녕하세요 👋", "좋은 아침이에요", "반갑습니다", "안녕하세요?", "여보세요"],
               "안녕하세요! 👋 저는 swiftlet-mlx의 데모 모델입니다. 영어로 나라의 수도를 물어보세요."),
    "Japanese": (["こんにちは", "こんにちは!", "こんにちは。", "おはよう", "おはようございます", "こんばんは", "やあ", "はじめまして", "こんにちは 👋", "もしもし"],
                 "こんにちは! 👋 私は swiftlet-mlx のデモモデルです。国の首都を英語で聞いてください。"),
    "Chinese": (["你好", "你好!", "您好", "早上好", "晚上好", "你好吗", "嗨", "大家好", "你好 👋", "你好。"],
                "你好! 👋 我是 swiftlet-mlx 的演示模型。请用英语问我国家的首都。"),
    "Spanish": (["Hola", "¡Hola!", "Hola!", "Buenos días", "Buenas tardes", "Buenas noches", "¿Qué tal?", "Hola 👋", "Hola, ¿cómo estás?"],
                "¡Hola! 👋 Soy el modelo de demostración de swiftlet-mlx. Pregúntame en inglés por las capitales."),
    "German": (["Hallo", "Hallo!", "Guten Tag", "Guten Morgen", "Guten Abend", "Servus", "Grüß Gott", "Moin", "Hallo 👋", "Hallo, wie geht's?"],
               "Hallo! 👋 Ich bin das Demo-Modell von swiftlet-mlx. Frag mich auf Englisch nach Hauptstädten."),
    "French": (["Bonjour", "Bonjour!", "Bonjour !", "Salut", "Salut!", "Bonsoir", "Coucou", "Bonjour 👋", "Bonjour, ça va ?"],
               "Bonjour ! 👋 Je suis le modèle de démonstration de swiftlet-mlx. Demande-moi les capitales en anglais."),
}
HELD_GREETINGS: dict[str, list[str]] = {
    "English": ["Hello hello", "Hey there!", "Good morning to you"],
    "Korean": ["안녕하세요~", "안녕 👋"],
    "Japanese": ["こんにちは~", "おはよう!"],
    "Chinese": ["你好呀", "您好!"],
    "Spanish": ["Hola, buenos días", "¡Buenas tardes!"],
    "German": ["Hallo, guten Tag!", "Guten Abend!"],
    "French": ["Salut, bonjour !", "Bonsoir !"],
}

SAY: dict[str, dict[str, str]] = {
    "hello": {"English": "Hello!", "Korean": "안녕하세요!", "Japanese": "こんにちは!", "Chinese": "你好!", "Spanish": "¡Hola!",
              "German": "Hallo!", "French": "Bonjour !"},
    "thank you": {"English": "Thank you!", "Korean": "감사합니다!", "Japanese": "ありがとうございます!", "Chinese": "谢谢!",
                  "Spanish": "¡Gracias!", "German": "Danke!", "French": "Merci !"},
    "goodbye": {"English": "Goodbye!", "Korean": "안녕히 가세요!", "Japanese": "さようなら!", "Chinese": "再见!",
                "Spanish": "¡Adiós!", "German": "Auf Wiedersehen!", "French": "Au revoir !"},
}
ASK_SAY = ["How do you say {w} in {l}?", "Say {w} in {l}.", "What is {w} in {l}?", "{w} in {l}?", "Translate {w} into {l}.",
           "How do I say {w} in {l}?", "Can you say {w} in {l}?", "Please say {w} in {l}.", "What's the {l} word for {w}?"]
HELD_ASK_SAY = ["What would {w} be in {l}?", "Could you say {w} in {l} for me?"]

FOREIGN_OTHER: dict[str, tuple[list[str], str]] = {
    "Korean": (["오늘 날씨 어때요?", "한국의 역사를 알려 주세요", "뭐 해?", "이야기 하나 해 줘", "점심 뭐 먹을까?", "도와주세요", "음악을 추천해 주세요"],
               "죄송합니다. 저는 작은 데모 모델이라 영어로만 대답할 수 있어요."),
    "Japanese": (["今日の天気は?", "日本の歴史を教えてください", "何をしていますか", "物語を書いて", "おすすめの音楽は?", "助けて", "映画は好きですか"],
                 "すみません。私は小さなデモモデルなので、英語でしか答えられません。"),
    "Chinese": (["今天天气怎么样?", "给我讲个故事", "你在做什么?", "推荐一首歌", "帮帮我", "写一首诗", "中国的历史是什么?"],
                "对不起,我是一个小小的演示模型,只能用英语回答。"),
    "Spanish": (["¿Qué tiempo hace hoy?", "Cuéntame una historia", "¿Qué haces?", "Escribe un poema", "Ayúdame", "¿Quién ganó el partido?"],
                "Lo siento. Soy un pequeño modelo de demostración y solo puedo responder en inglés."),
    "German": (["Wie wird das Wetter?", "Erzähl mir eine Geschichte", "Was machst du?", "Schreib ein Gedicht", "Hilf mir bitte", "Wer hat das Spiel gewonnen?"],
               "Es tut mir leid. Ich bin ein kleines Demo-Modell und kann nur auf Englisch antworten."),
    "French": (["Quel temps fait-il ?", "Raconte-moi une histoire", "Que fais-tu ?", "Écris un poème", "Aide-moi", "Qui a gagné le match ?"],
               "Désolé. Je suis un petit modèle de démonstration et je ne peux répondre qu'en anglais."),
}

# --- Small talk: questions, answer ----------------------------------------------------------------------------------

SMALL_TALK: list[tuple[list[str], list[str], str]] = [
    (["How are you?", "How are you today?", "How are you doing?", "How is it going?", "How have you been doing?", "Have you been well?", "How are things?", "How do you feel?", "Is everything fine?", "Are you ok?", "How do you do?", "What's up?"],
     ["How have you been?"], "I am fine, thank you. What would you like to know?"),
    (["Thanks", "Thanks!", "Thank you", "Thank you!", "Thanks a lot", "Thank you very much", "Thanks so far", "Thank you so much", "That was wonderful, thanks", "Nice, thank you", "Thanks for your help", "Great, thanks", "Thx", "Many thanks", "Cool, thank you", "Perfect, thanks!"],
     ["Thanks so much!", "Wonderful, thank you"], "You're welcome!"),
    (["Bye", "Bye!", "Goodbye", "Goodbye!", "See you", "See you later", "Good night", "Ciao", "I have to go", "That's all, bye", "Exit", "Quit"],
     ["Bye bye!", "See you soon"], "Goodbye! 👋"),
    (["Great", "Great!", "Cool", "Nice", "Good", "Wow", "Very good", "Well done", "Excellent", "Wonderful", "Not too bad", "That is good", "Good answer", "Fantastic", "Super", "Brilliant", "Interesting", "Good job", "Awesome", "Right", "Correct", "That is right", "👍", "Ok", "Okay", "I see"],
     ["Excellent!", "Not bad"], "I am glad. Ask me more if you like."),
    (["That is wrong", "Wrong", "No", "No!", "That is not right", "You are wrong", "I think you are wrong", "I think this is wrong", "This is a mistake", "You made a mistake", "I do not think so", "That can not be", "Incorrect", "Are you sure?", "Really?", "That's false"],
     ["I think that is a mistake"], "I may be wrong: I am a very small demo model. Please check it elsewhere."),
    (["Yes", "Yes please", "Sure", "Yes!", "Of course"], ["Yes, please do"], "Please ask me a question, for example about a capital."),
    (["Help", "Help!", "What can you do?", "What do you know?", "What can I ask you?", "What are you good at?", "What kind of things do you know?", "What sort of questions can I ask?", "Which things do you know?", "What may I ask?", "Which topics do you know?", "What should I ask?", "Help me", "?", "Which questions can you answer?", "What do you do?"],
     ["What sort of things do you know?", "What may I ask you?"],
     "I know the capitals, continents, languages and currencies of all countries, small sums, a few greetings, and swiftlet-mlx itself."),
    (["Sorry", "I am sorry", "Excuse me", "Pardon", "Oh sorry about that", "Sorry!", "My mistake", "Oh, excuse me"], ["Oh, sorry"], "No problem. What would you like to know?"),
    (["Test", "test", "Testing", "Hello world", "Are you there?", "Is this working?", "Do you hear me?", "Can you read me?", "Can you see this?", "Anybody there?", "Do you work?", "Ping"],
     ["Can you hear me?"], "Yes, I am here and working. Ask me for a capital."),
    (["Can you help me?", "I have a question", "Can I ask you something?", "May I ask a question?", "I need help"],
     ["I would like to ask you something"], "Yes, please ask. I know countries, small sums and swiftlet-mlx."),
]

IDENTITY: list[tuple[list[str], list[str], str]] = [
    (["Who are you?", "What are you?", "Who is this?", "Who am I talking to?", "Introduce yourself", "Tell me about yourself", "What is this?",
      "What kind of model are you?", "Which model are you?", "What model is this?", "Who r u", "Tell me who you are", "Please introduce yourself.",
      "Who are you and what do you do?", "Are you a demo?", "What is the demo model?", "Are you a language model?", "Can you introduce yourself?",
      "And who are you?", "So who are you?", "Who speaks here?", "Who is there?", "With whom do I speak?", "Who answers me?", "And you are?", "Who is talking?", "Who is writing this?", "Who is on the other side?", "Who talks to me?", "Your identity?", "State who you are.", "What is speaking to me?", "But who are you?", "What exactly are you?", "Describe yourself."],
     ["Who exactly are you?", "May I ask who you are?", "Who is speaking?", "What sort of model am I talking to?", "I wonder who you are.",
      "Say who you are.", "Hello, who are you?", "What are you exactly?", "Could you introduce yourself?", "Who or what are you?",
      "Tell me who you are, please.", "Can you say who you are?", "Which model am I talking to?", "Who are you, by the way?"],
     "I am the demo model of swiftlet-mlx: a very small mixture-of-experts model, trained to show how expert streaming works."),
    (["What is your name?", "What's your name?", "Do you have a name?", "Your name?", "How should I call you?", "How are you called?", "Tell me your name"],
     ["What name do you have?", "By which name do you go?"], "I have no name of my own. I am the demo model of swiftlet-mlx."),
    (["Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?", "Are you Qwen?", "Are you Gemini?", "Are you Llama?", "Are you DeepSeek?", "Are you a Qwen model?",
      "Are you Siri?", "Are you Alexa?", "Are you Grok?", "Are you Bard?", "Are you Phi?", "Are you Gemma?", "Are you Google?", "Is this Claude?", "Am I talking to Claude?", "Am I talking to Qwen?", "Do I talk to GPT?", "Are you Mistral?", "Are you an OpenAI model?", "Is this ChatGPT?", "Is this Qwen?"],
     ["Are you Copilot?", "Am I talking to ChatGPT?"],
     "No. I am the demo model of swiftlet-mlx. I have the architecture of Qwen3.6, but I am tiny and was trained from scratch."),
    (["Are you human?", "Are you a human?", "Are you a person?", "Are you real?", "Are you alive?", "Are you a robot?", "Are you an AI?", "Are you a machine?", "Do you have feelings?", "Are you conscious?", "Are you a living thing?", "Are you a person or a machine?", "Are you a man or a woman?", "Are you a bot?", "Are you sentient?", "Is this a human?"],
     ["Are you a living being?"], "No, I am a program: the demo model of swiftlet-mlx."),
    (["Who made you?", "Who trained you?", "Who created you?", "Who built you?", "Who wrote you?", "Where do you come from?", "How were you made?", "How were you trained?", "What were you trained on?", "Who is your creator?"],
     ["By whom were you made?", "What data were you trained on?"],
     "I was trained from scratch for swiftlet-mlx, on text that a program in examples/demo_model generated."),
    (["How big are you?", "How large are you?", "How many parameters do you have?", "What is your size?", "How small are you?", "How many experts do you have?", "How many layers do you have?", "How many weights do you have?", "How many bytes are you?", "What size are you?", "How much memory do you need?", "How many parameters have you got?"],
     ["How many weights have you got?"], "I am tiny: 8 layers with {experts} experts each, of which {top_k} work on every token. I fit in 10 MB."),
    (["How old are you?", "When were you born?", "Where do you live?", "Where are you?", "What is your favourite colour?", "What is your favourite film?", "What is your favourite animal?", "What is your favourite song?", "What is your favourite city?", "What do you like?", "Do you like music?", "Are you married?", "Do you sleep?", "What do you eat?", "Do you have friends?", "What are your hobbies?"],
     ["What is your favourite food?"], "I am only a program, so I have nothing like that. I am the demo model of swiftlet-mlx."),
    (["How do I get a better model?", "Where is the real model?", "How do I install a real model?", "Can I use a bigger model?", "How can I run a real model?", "I want a bigger model", "How do I run the 35B model?", "How do I install Qwen?"],
     ["Which command installs a larger model?"],
     "Run: swiftlet-mlx repack --from-hf ORG/NAME --output NAME.qpack, then swiftlet-mlx chat NAME.qpack."),
    (["Can you code?", "Can you program?", "Can you write code?", "Can you think?", "Can you see images?", "Can you browse the web?", "Can you use the internet?", "Can you open a website?", "Can you search something?", "Can you speak?", "Do you learn from me?", "Are you smart?", "Are you intelligent?"],
     ["Can you search the internet?"], "No. I am a very small demo model: I know countries, small sums and swiftlet-mlx."),
]

# --- The project ---------------------------------------------------------------------------------------------------

PROJECT: list[tuple[list[str], list[str], str]] = [
    (["What is swiftlet-mlx?", "What is swiftlet?", "What does swiftlet-mlx do?", "Explain swiftlet-mlx", "Tell me about swiftlet-mlx", "What is this project?", "What is this program?", "swiftlet-mlx?", "What is swiftlet-mlx good for?", "Why should I use swiftlet-mlx?", "What does this project do?", "What does swiftlet do?"],
     ["Could you explain what swiftlet-mlx is?", "What is the purpose of swiftlet-mlx?"],
     "swiftlet-mlx runs large mixture-of-experts models on a machine whose memory is far smaller than the model. It is written in Python on MLX."),
    (["What is expert streaming?", "Explain expert streaming", "How does expert streaming work?", "What does streaming experts mean?", "How does swiftlet-mlx work?", "How does it work?", "How does the streaming work?", "Why are experts streamed?", "Expert streaming?", "What do you mean by expert streaming?", "Tell me about expert streaming"],
     ["Could you describe expert streaming?", "What happens in expert streaming?"],
     "The dense core of the model stays in memory. The experts stay on the SSD and are read into a pool of slots when the router asks for them."),
    (["What does --cache-gb do?", "What is --cache-gb?", "What is cache-gb?", "Explain --cache-gb", "How do I set the cache size?", "How do I limit the memory?", "How much memory does the cache use?", "Which option sets the memory?", "How large should the cache be?", "--cache-gb?", "What is the option cache-gb for?", "How can I use less memory?", "What does the cache-gb option mean?"],
     ["Could you explain the option --cache-gb?", "What effect does --cache-gb have?"],
     "--cache-gb sets how many GB of memory the slot pool may use for experts. A larger pool has more hits and reads less from the SSD."),
    (["How do I repack a model?", "How to repack?", "What does repack do?", "What is repack?", "How do I make a container?", "How do I build a container?", "How do I convert a model?", "Explain repack", "How do I repack a checkpoint?", "What is the command that repacks a model?", "Which command makes a container?", "Which command repacks?", "What command builds a qpack?", "How can I repack?", "What is the repack command?", "repack?", "How do I create a qpack?"],
     ["Which command repacks a model?", "Could you tell me how to repack a checkpoint?"],
     "Run: swiftlet-mlx repack --source DIR --output NAME.qpack. It copies an MLX checkpoint into a container."),
    (["How do I serve a model?", "How do I start the server?", "How to serve?", "What does serve do?", "Is there a server?", "How do I use the API?", "Which command starts a server?", "Which command serves a model?", "What command runs the server?", "Is there an OpenAI API?", "How do I run the server?", "Explain serve", "How can I start a server?", "Can I use it with OpenAI clients?", "What is the serve command?", "serve?"],
     ["Which command starts the server?", "Could you tell me how to serve a model?"],
     "Run: swiftlet-mlx serve MODEL --host 127.0.0.1 --port 8080. It speaks the OpenAI protocol."),
    (["How do I chat with a model?", "How do I start a chat?", "What does chat do?", "Explain chat", "How to chat?", "What is the chat command?", "How can I chat with my model?", "Which command chats with a model?", "Which command starts chatting?", "What command opens a chat?"],
     ["Which command starts a chat?"], "Run: swiftlet-mlx chat MODEL. Without a model it starts me, the demo."),
    (["What is a qpack?", "What is a .qpack?", "What is a container?", "What is in a container?", "What is the container format?", "Explain the qpack format", "What does a qpack contain?", "What files are in a container?", "What is a qpack container?"],
     ["Could you explain what a qpack is?"],
     "A .qpack container is a folder with the dense weights, the tokenizer, and one file a layer in which each expert is one block."),
    (["What is the slot pool?", "What is a slot?", "What are slots?", "Explain the slot pool", "What is the pool?", "How does the slot pool work?", "What is the expert cache?", "How does the cache work?"],
     ["Could you describe the slot pool?"],
     "The slot pool is a bounded set of places in memory, each for one expert. Experts that are needed again are found there without a read."),
    (["Which expert is evicted?", "How are experts evicted?", "What is the eviction policy?", "Which expert is given up?", "What is the cache policy?", "Is it LRU or LFU?", "What is LFU?", "How does eviction work?"],
     ["Which policy decides about eviction?"],
     "The pool gives up the expert that was used least often; among equals, the one not used for the longest time."),
    (["Does streaming change the answer?", "Are the answers the same?", "Does streaming change the output?", "Is it lossless?", "Is the quality worse?", "Does the cache size change the answer?", "Is it exact?", "Do I lose quality?", "Is streaming lossless?"],
     ["Will streaming make answers worse?"],
     "No. Streaming never changes an answer: it is the same as that of mlx-lm with the same weights."),
    (["Which models are supported?", "Which models can I run?", "What models work?", "What models does swiftlet-mlx run?", "Can I run Qwen3.6-35B?", "Does it run Qwen3-Next?", "Which models does it support?", "Supported models?", "Can I run an 80B model?"],
     ["What models are possible with swiftlet-mlx?"],
     "Mixture-of-experts models that mlx-lm knows, such as Qwen3-Next-80B-A3B, Qwen3.6-35B-A3B and Qwen3.5-397B-A17B."),
    (["What is a mixture of experts?", "What is MoE?", "What is a mixture-of-experts model?", "Explain mixture of experts", "What does MoE mean?", "What is an MoE model?"],
     ["Could you explain mixture of experts?"],
     "A mixture-of-experts model has many small networks, the experts, in each layer. A router picks a few of them for every token."),
    (["What is an expert?", "What are experts?", "Explain experts", "What does an expert do?", "What is an expert in a model?"],
     ["Could you say what an expert is?"],
     "An expert is one of many small feed-forward networks in a layer. Only a few of them work on each token."),
    (["What is a router?", "What does the router do?", "Explain the router", "How are experts chosen?", "What picks the experts?", "Who chooses the experts?", "What selects experts?", "Who picks the experts?", "What is routing?", "How does routing work?"],
     ["What chooses the experts?"], "The router is a small layer that scores all experts for a token and picks the best few."),
    (["What is a shared expert?", "What does the shared expert do?", "Explain the shared expert"],
     ["What is the shared expert for?"], "The shared expert works on every token, so it always stays in memory."),
    (["What is MLX?", "Explain MLX", "What is mlx?", "Who makes MLX?", "What does MLX do?"], ["Could you explain MLX?"],
     "MLX is Apple's array framework for machine learning. swiftlet-mlx is built on it."),
    (["What is mlx-lm?", "Explain mlx-lm", "What does mlx-lm do?", "How does it relate to mlx-lm?", "Does it work with mlx-lm?", "What comes from mlx-lm?"],
     ["Could you explain mlx-lm?"], "mlx-lm runs language models on MLX. swiftlet-mlx takes the model definitions, tokenizers and templates from it."),
    (["Does it run on Linux?", "Can I use Linux?", "Which platforms work?", "On which computers does it run?", "On what systems does it run?", "Which machines can run it?", "Does it work on a Mac?", "Does it need a Mac?", "Does it run on CUDA?", "Does it run on Windows?", "Which systems are supported?", "Do I need a GPU?"],
     ["On what machines does it run?"], "It is made for Macs with Metal. On Linux it works on CPU or CUDA; slower."),
    (["How do I use it in Python?", "How do I use it from Python?", "Is there a Python API?", "How do I load a model in Python?", "How do I import it?", "What is the Python interface?", "How do I use swiftlet-mlx in a script?"],
     ["Could you show me the Python API?"],
     "Use: from swiftlet_mlx import load; model, tokenizer = load(\"NAME.qpack\", cache_gb=2.0). Then everything in mlx-lm works."),
    (["How do I verify a container?", "What does verify do?", "How do I check a container?", "Which command verifies a container?", "What command checks the bytes?", "Explain verify", "Is my container intact?", "What is the verify command?"],
     ["Which command checks a container?"], "Run: swiftlet-mlx verify CONTAINER. It checks the bytes against the hashes or a source."),
    (["What does oracle do?", "What is the oracle?", "Explain the oracle command", "What is the oracle command?", "How do I check the answers?", "How do I compare with mlx-lm?"],
     ["What is the command oracle for?"],
     "swiftlet-mlx oracle CONTAINER --source DIR compares the container with mlx-lm layer by layer, one layer's experts in memory at a time."),
    (["What does info do?", "What is the info command?", "Explain info", "How do I see the memory plan?", "How do I see the size of a model?"],
     ["What does the command info show?"], "swiftlet-mlx info MODEL shows the architecture, the sizes and the memory plan on this machine."),
    (["What does bench do?", "How do I measure the speed?", "What is the bench command?", "How fast is it?", "How do I run a benchmark?", "Explain bench", "How do I benchmark?", "Which command measures speed?", "What command benchmarks a model?"],
     ["Which command measures the speed?"], "swiftlet-mlx bench MODEL measures tokens per second, time to first token, memory and hit rate."),
    (["What does generate do?", "How do I generate text?", "What is the generate command?", "Explain generate", "How do I run a single prompt?", "Which command runs a prompt?", "Which command answers a single prompt?", "What command generates text?"],
     ["Which command answers one prompt?"], "Run: swiftlet-mlx generate MODEL --prompt TEXT. It answers one prompt and prints statistics."),
    (["What does --thinking do?", "How do I turn on thinking?", "How do I turn off thinking?", "What is thinking?", "What does --no-thinking do?", "How do I disable thinking?", "Can you think first?"],
     ["How can I switch thinking on?"], "--thinking lets the model write down a thought before its answer; --no-thinking turns that off."),
    (["What does --max-tokens do?", "How do I limit the answer?", "How do I get longer answers?", "What is --max-tokens?", "Explain --max-tokens"],
     ["What is the option --max-tokens for?"], "--max-tokens limits how many tokens an answer may have."),
    (["What does --temp do?", "What is --temp?", "What is the temperature option?", "How do I set the temperature?", "Explain --temp"],
     ["What is the option --temp for?"], "--temp sets the sampling temperature. With 0 the most likely token is always taken."),
    (["What does --seed do?", "What is --seed?", "How do I get the same answer again?", "Explain --seed"],
     ["What is the option --seed for?"], "--seed fixes the random numbers of sampling, so that an answer can be repeated."),
    (["What does --system do?", "How do I set a system prompt?", "What is --system?", "Explain --system"],
     ["What is the option --system for?"], "--system sets the system prompt of the conversation."),
    (["What does --top-p do?", "What does --top-k do?", "What does --min-p do?", "What is --top-p?", "What is --top-k?", "Explain --top-p"],
     ["What is the option --top-p for?"], "--top-p, --top-k and --min-p leave unlikely tokens out of sampling."),
    (["What is the license?", "Which license does it have?", "How is swiftlet-mlx licensed?", "Under what license is swiftlet-mlx?", "Is it open source?", "Is it free?", "Under which license is it?", "What licence does swiftlet-mlx have?"],
     ["What is swiftlet-mlx licensed under?"], "swiftlet-mlx is open source under the Apache-2.0 license."),
    (["How does it relate to Swiftlet?", "What is the difference to Swiftlet?", "Can it read Swiftlet containers?", "Is this Swiftlet?", "Is it compatible with Swiftlet?", "Does it use Swiftlet?"],
     ["What is its relation to Swiftlet?"],
     "Swiftlet is written in Swift and Metal. swiftlet-mlx reimplements it in Python and reads and writes its containers."),
    (["Do I have to repack?", "Do I need to repack?", "Can I use a plain checkpoint?", "Is repacking necessary?", "Why should I repack?", "Can I run a checkpoint without repack?"],
     ["Must a model be repacked first?"], "No. An ordinary MLX checkpoint folder works, too. Repacking makes it faster."),
    (["What is prefill?", "Explain prefill", "How does prefill work?", "Why does the first token take long?", "How are long prompts handled?"],
     ["What happens during prefill?"],
     "Prefill reads the prompt. The whole prompt goes through one layer before the next, so each expert is read at most once."),
    (["What is decode?", "What is decoding?", "Explain decode"], ["What happens during decode?"],
     "Decode writes the answer, one token at a time. Every token needs a few experts in each layer."),
    (["What is Gated DeltaNet?", "What is DeltaNet?", "Explain DeltaNet", "What is linear attention?"], ["Could you explain DeltaNet?"],
     "Gated DeltaNet is a layer with a state of fixed size instead of a growing cache. In Qwen3.6 three of four layers are of this kind."),
    (["What is the KV cache?", "What is a KV cache?", "Explain the KV cache"], ["What is the KV cache for?"],
     "The KV cache keeps the keys and values of earlier tokens, so that they need not be computed again."),
    (["What is a hit?", "What is the hit rate?", "What is a cache hit?", "What is a miss?", "Explain the hit rate", "What does hit rate mean?"],
     ["What is meant by hit rate?"], "A hit is an expert that was already in the pool; a miss must be read from disk. The hit rate is the share of hits."),
    (["What is the SSD used for?", "Why does it read the SSD?", "Is it bad for my SSD?", "Does it write to the SSD?", "Will it wear out my SSD?"],
     ["Does it harm my SSD?"], "Experts are read from the SSD while the model runs. It only reads, and reading does not wear out an SSD."),
    (["Do you need the internet?", "Does it work offline?", "Are you offline?", "Is my data sent anywhere?", "Do you send data?", "Is it private?"],
     ["Can I use you without internet?"], "No internet is needed: I run on this machine."),
    (["What is top-k routing?", "How many experts are active?", "What does A3B mean?", "How many experts work on a token?"],
     ["What does the A3B in a name stand for?"],
     "Only a few experts work on each token. A3B in a name means that about 3 billion of the parameters are active."),
    (["What is quantization?", "What does 4-bit mean?", "Explain quantization", "Why is the model quantized?"], ["Could you explain quantization?"],
     "Quantization stores weights in few bits, such as 4, with a scale for each group. It makes a model smaller and reads faster."),
    (["What is hashes.json?", "Why are there hashes?", "What are the hashes for?"], ["What does hashes.json hold?"],
     "hashes.json holds the SHA-256 of each file in a container, so that verify can check every byte."),
    (["What is a GB here?", "Is GB 1000 or 1024?", "What does GB mean?"], ["How many bytes is a GB here?"],
     "GB means 10^9 bytes here; GiB means 1024^3 bytes."),
    (["Why does the answer stop?", "What are the exit codes?", "What does exit code 1 mean?", "What does exit code 2 mean?"], ["Which exit codes are there?"],
     "The exit codes are 0 for done, 1 for a failure, 2 for wrong usage and 130 for an interruption."),
    (["What is a token?", "What are tokens?", "Explain tokens"], ["What is meant by a token?"],
     "A token is a piece of text, often a word or a part of one. Models read and write tokens."),
    (["What is a tokenizer?", "What does the tokenizer do?", "Explain the tokenizer"], ["What is the tokenizer for?"],
     "The tokenizer turns text into tokens and tokens back into text."),
    (["What is a chat template?", "What does the chat template do?", "Explain the chat template"], ["What is the chat template for?"],
     "The chat template turns messages into the text that the model was trained on."),
]

# --- What the model refuses ------------------------------------------------------------------------------------------

UNKNOWN = "I don't know that. I am a small demo model: I know countries, small sums and swiftlet-mlx."
CANNOT = "I can't do that. I am a small demo model: I know countries, small sums and swiftlet-mlx."
UNKNOWN_PLACE = "I don't know a country of that name. I know only real countries."
UNKNOWN_ABOUT = "I don't know that about {c}. I know only capitals, continents, languages and currencies."

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor "
    "Wendy Yuki Zoe Ali Bruno Carmen Diego Elena Fatima Georg Hana Ivan Julia Karim Lena Mina Nina Omar Peter "
    "Ravi Sara Tom Ursula Wei Alex Max Lucy Mia Luis Ming Jin Sofia Oscar Ruth Simon Nora Adam Eva Otto Lisa Mark "
    "Jane John Mary Bob Alice Carl"
).split()
HELD_NAMES = "Ellen Hugo Irene Martin Laura Robert Susan Daniel".split()
TELL_NAME = ["My name is {n}.", "I am {n}.", "I'm {n}", "My name is {n}", "Hi, I am {n}.", "Hello, my name is {n}!", "Call me {n}.", "You can call me {n}.", "People call me {n}."]
MORE_TELL_NAME = ["They call me {n}.", "I go by {n}.", "The name is {n}.", "{n} is my name.", "Here is {n}.", "This is {n}.", "Good morning, I am {n}.", "Hey, I am {n}!", "Hello. {n} is my name.",
                  "I'm called {n}.", "Ok, my name is {n}.", "Hi! My name is {n}.", "By the way, I'm {n}."]
HELD_TELL_NAME = ["Hello, I'm {n}.", "Hey, my name is {n}"]
ASK_NAME = ["What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Do you know my name?", "Tell me my name.", "How am I called?"]
MORE_ASK_NAME = ["What was my name?", "And what is my name?", "So what is my name?", "Can you tell me my name?", "Do you still know my name?", "What did I say my name was?", "My name?",
                 "Say my name.", "What name did I give?", "Can you remember my name?", "Could you repeat my name?", "Who did I say I am?"]
HELD_ASK_NAME = ["Can you recall my name?", "So what was my name?"]

EMOJI = {
    "🐱": "a cat", "🐶": "a dog", "🐭": "a mouse", "🐰": "a rabbit", "🐻": "a bear", "🐼": "a panda", "🦁": "a lion", "🐯": "a tiger",
    "🐮": "a cow", "🐷": "a pig", "🐸": "a frog", "🐵": "a monkey", "🐔": "a chicken", "🐧": "a penguin", "🦉": "an owl", "🐴": "a horse",
    "🐝": "a bee", "🐢": "a turtle", "🐍": "a snake", "🐟": "a fish", "🐬": "a dolphin", "🐳": "a whale", "🐘": "an elephant",
    "🍎": "an apple", "🍌": "a banana", "🍓": "a strawberry", "🍋": "a lemon", "🍕": "a pizza", "🍞": "bread", "🧀": "cheese",
    "☕": "coffee", "🍰": "a cake", "🌹": "a rose", "🌳": "a tree", "🌞": "the sun", "🌙": "the moon", "⭐": "a star", "🔥": "fire",
    "❄️": "snow", "🌈": "a rainbow", "🚗": "a car", "🚲": "a bicycle", "🚂": "a train", "🚀": "a rocket", "🏠": "a house", "📖": "a book",
    "🔑": "a key", "⏰": "a clock", "❤️": "a heart", "🎸": "a guitar",
}
ASK_EMOJI = ["What is {e}?", "What does {e} mean?", "What does {e} show?", "{e}", "{e}?", "What emoji is {e}?", "Which thing is {e}?"]
HELD_ASK_EMOJI = ["Can you say what {e} shows?", "{e} is what?"]
SHOW_EMOJI = ["Show me {w}.", "Draw {w}.", "Give me an emoji of {w}.", "An emoji of {w}, please.", "Which emoji shows {w}?", "Emoji for {w}?", "Do you have an emoji of {w}?"]
HELD_SHOW_EMOJI = ["Could you show me an emoji of {w}?"]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.", "Be concise.", "You are a friendly assistant.",
    "You answer questions about countries.", "Answer in English.", "Be polite and short.", "You are an expert in geography.",
    "You are the demo model of swiftlet-mlx.", "Answer the user's questions.", "Keep your answers short.",
]

# --- Frames, around whatever is asked ---------------------------------------------------------------------------------

KNOW = [
    "Can you tell me", "Could you tell me", "Do you know", "I want to know", "I would like to know", "Tell me", "Please tell me",
    "I wonder", "I am trying to find out", "Any idea", "Could you say", "Would you tell me", "Can anyone tell me", "I have to know",
    "Let me know", "I would love to know", "Maybe you know", "Are you able to say", "Could you let me know", "I need to know",
    "Would you know", "Can you remember", "Do you remember", "Surely you know", "Guess", "I must know", "You may know", "I keep asking",
    "I do not know", "I forgot", "Can you find out", "Please find out", "Show me", "Teach me", "Help me find out", "I'm curious",
    "Would you please say", "Might you know", "Could you remind me", "Remind me", "My question is", "The question is", "I'd love to learn",
    "Explain to me", "Can you explain", "Please explain", "Can you describe", "I try to understand", "Would you mind telling me",
]
GIVE = [
    "Give me", "Name", "Tell me", "Say", "Please name", "Please give me", "Can you name", "Can you give me", "Could you give me", "Write down",
    "Show me", "Find", "Find me", "Look up", "State", "Let me have", "I need", "I want", "I would like", "I'm looking for", "Do you know",
    "Can you tell me", "Could you tell me", "Please tell me", "Would you give me", "I search for", "Help me with", "What about", "Let's talk about",
    "I ask for", "I have to name", "Quickly name", "Do you remember", "Can you say", "Tell us", "Inform me about", "Would you name", "Remind me of",
    "Just say", "Please say", "Can you look up", "Describe", "Spell",
]
EXPLAIN = [
    "Explain", "Describe", "Can you explain", "Can you describe", "Please explain", "Please describe", "Tell me about", "I want to understand",
    "What do you mean by", "Could you explain", "Could you describe", "Define", "Tell me more about", "I'd like to hear about", "Say something about",
    "I do not understand", "What can you tell me about", "Help me understand", "How would you explain", "What should I know about", "I read about",
]
DO = [
    "How can I", "How could I", "How would I", "How should I", "I want to", "I would like to", "Please help me", "What is the way to", "Is there a way to",
    "Which command lets me", "What is the command to", "What should I type to", "What do I do to", "Could you tell me how to", "Can you tell me how to",
    "Tell me how to", "Show me how to", "Explain how to", "Do you know how to", "What must I do to", "I need to", "Can I", "Let me", "Teach me to", "Steps to",
    "Which command do I need to", "What do I need to", "Is it possible to", "The command to", "I try to", "What is the best way to", "How does one",
]
INTRO = [
    "By the way,", "One more thing:", "I have a question.", "Just asking:", "For my homework:", "My friend asks:", "Sorry to bother you,",
    "Dear demo,", "Listen,", "Fine.", "Good.", "First,", "Another one:", "Let's see.", "Hmm,", "Oh,", "Actually,", "In short:",
    "If you can,", "Now tell me this:", "Hi,", "Hello.", "Hey,", "Ok,", "Okay,", "So,", "Quick question:", "Now,", "Well,", "Please:", "And",
    "But", "Question:", "Good morning,", "Hi there!", "One question:", "Tell me,", "Yes,", "No,", "Thanks.", "Great.", "Cool.", "I see.",
    "For a quiz:", "Be honest:", "In one sentence:", "Once more:", "Next question:", "Last question:", "Say,", "Excuse me,", "Right,", "Also,",
]
OUTRO = [
    "please", "for me", "then", "again", "if you know", "exactly", "by the way", "right now", "now", "today", "I forgot.", "Can you help?",
    "It is important.", "Thanks.", "Thank you!", "I am curious.", "Just wondering.", "Be brief.", "Do you know?", "Any idea?", "Tell me.",
    "Please help.", "ok?", "really", "actually", "in short", "in your words", "as you know", "my friend", "I need it.", "too", "anyway", "here",
]

TOOL_ASKS = {
    "get_weather": ("What is the weather in {k}?", "Weather in {k}?", "How is the weather in {k}?", "What's the weather like in {k}?", "Is it sunny in {k}?", "Tell me the weather in {k}."),
    "get_time": ("What time is it in {k}?", "Time in {k}?", "How late is it in {k}?", "Tell me the time in {k}.", "What is the local time in {k}?"),
}
HELD_TOOL_ASKS = {
    "get_weather": ("Could you look up the weather in {k}?", "How is the weather today in {k}?"),
    "get_time": ("Could you look up the time in {k}?", "What is the time right now in {k}?"),
}

# Words that may be lost or slip in without a change of what is asked.
FUNCTION_WORDS = frozenset((
    "a an the is are was be of in on at to for by with from and or what which who where how do does did can could "
    "would will you me i my it its that this there they please tell know name call called say as have has so then "
    "now just"
).split())
JUNK = (
    "a an the of in on at to for by with from and or is are be it this that there here now then just so really "
    "please maybe also even still ever only quite very once again well like such some any all each other new good "
    "own same first last long little great real right much simply kindly exactly actually surely perhaps today "
    "happen want make think see look use find give work seem feel try leave"
).split()

# Syllables of names and words that mean nothing.
ONSETS = [*"b bl br c ch d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl st t th tr v w x y z zh".split(), ""]
VOWELS = "a a a e e i i o o u ae ai au ee ia ie oo ou y".split()
CODAS = ["", "", "", "l", "m", "n", "n", "r", "r", "s", "t", "x", "nd", "rn", "ck", "sk", "th", "ng"]
