"""Questions that the model must refuse: what lies outside its small world, by kind.

Data only, written for this project (CC0). `TRAIN` pairs ways of asking with topics; `HELD` has other ways of asking
and other topics, for the evaluation.
"""

# ruff: noqa: E501
# fmt: off
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outside:
    """Ways of asking with {t} for the topic, the topics, and whether the answer is "can't" instead of "don't know"."""

    ask: tuple[str, ...]
    topics: tuple[str, ...]
    cannot: bool = False


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


PEOPLE = _words(
    "Albert Einstein, Isaac Newton, Marie Curie, Napoleon, Julius Caesar, Cleopatra, Shakespeare, Mozart, Beethoven, Picasso, "
    "Leonardo da Vinci, Charles Darwin, Galileo, Aristotle, Plato, Socrates, Abraham Lincoln, George Washington, Barack Obama, "
    "Elon Musk, Bill Gates, Steve Jobs, Michael Jackson, Madonna, Taylor Swift, Lionel Messi, Cristiano Ronaldo, Pele, Roger Federer, "
    "Muhammad Ali, Michael Jordan, Brad Pitt, Tom Hanks, Marilyn Monroe, Charlie Chaplin, Walt Disney, Alfred Hitchcock, Queen Victoria, "
    "Genghis Khan, Alexander the Great, Confucius, Buddha, Gandhi, Nelson Mandela, Martin Luther King, Columbus, Magellan, Marco Polo, "
    "Alan Turing, Ada Lovelace, Nikola Tesla, Thomas Edison, Stephen Hawking, Sigmund Freud, Karl Marx, Adam Smith, Franz Kafka, Goethe, "
    "Dante, Homer, Tolstoy, Dostoevsky, Jane Austen, Charles Dickens, Mark Twain, Hemingway, Agatha Christie, J. K. Rowling, Harry Potter, "
    "Sherlock Holmes, Batman, Superman, Spider-Man, Darth Vader, Mickey Mouse, Santa Claus, Zeus, Odin, Hercules, King Arthur, Robin Hood, "
    "Bach, Chopin, Vivaldi, Rembrandt, Van Gogh, Monet, Michelangelo, Frida Kahlo, Andy Warhol, Bob Dylan, Elvis Presley, the Beatles, Queen"
)
HELD_PEOPLE = _words("Johannes Kepler, Oscar Wilde, Neil Armstrong, Serena Williams, Audrey Hepburn, Niels Bohr, Joan of Arc, Freddie Mercury")

THINGS = _words(
    "the speed of light, the boiling point of water, the mass of the Earth, the distance to the Moon, the size of the Sun, gravity, "
    "photosynthesis, evolution, quantum mechanics, relativity, a black hole, an atom, an electron, a molecule, DNA, a virus, a cell, "
    "the heart, the brain, the liver, blood, a volcano, an earthquake, a tsunami, the water cycle, climate change, the ozone layer, "
    "a comet, the Milky Way, a galaxy, a supernova, dark matter, the Big Bang, electricity, magnetism, nuclear fusion, a transistor, "
    "a laser, radar, an engine, a battery, a solar panel, the internet, Bluetooth, Wi-Fi, blockchain, bitcoin, inflation, the stock market, "
    "a mortgage, an interest rate, a tax, democracy, communism, capitalism, philosophy, ethics, logic, love, happiness, the meaning of life, "
    "time, consciousness, the soul, religion, Christmas, Easter, Halloween, Ramadan, Diwali, chess, poker, football, basketball, tennis, golf, "
    "cricket, rugby, baseball, the Olympic Games, the World Cup, yoga, a marathon, jazz, opera, hip hop, rock music, a symphony, a sonnet, "
    "a haiku, a novel, a verb, a noun, grammar, Latin, an algorithm, recursion, a compiler, a database, SQL, Python, Java, C++, Rust, JavaScript, "
    "HTML, Linux, Windows, Android, an iPhone, a Tesla, a helicopter, a submarine, a bicycle, a train, a bridge, the Eiffel Tower, "
    "the Great Wall, the Pyramids, Stonehenge, the Titanic, the Roman Empire, the Renaissance, the French Revolution, World War II, "
    "World War I, the Cold War, the Middle Ages, the Stone Age, a dinosaur, a whale, a lion, a spider, a mushroom, a tomato, an apple, "
    "rice, bread, cheese, wine, beer, coffee, tea, chocolate, sugar, salt, oil, gold, silver, iron, copper, diamond, plastic, paper, glass, "
    "water, fire, air, a cloud, rain, snow, wind, a rainbow, a tornado, the ocean, a desert, a forest, Mount Everest, the Amazon, the Nile, "
    "the Sahara, a triangle, a circle, pi, a prime number, a matrix, calculus, algebra, geometry, a derivative, an integral, statistics, "
    "a headache, a cold, fever, cancer, diabetes, asthma, an allergy, vitamin C, aspirin, a vaccine, sleep, a dream, a diet, protein"
)
HELD_THINGS = _words(
    "thermodynamics, a puffin, the Suez Canal, an orchestra, a microscope, the Ming dynasty, osmosis, entropy, hydrogen, a telescope, "
    "the Bermuda Triangle, a glacier, karate, a violin, ketchup, an avalanche, a kangaroo, cubism, an eclipse, sociology"
)

TASKS = _words(
    "write a poem, write a poem about spring, write a story, write a short story about a dog, write an essay, write a letter to my boss, "
    "write an email, write a song, write a haiku, write a joke, write a speech, write a Python function, write a program, write some code, "
    "write a sorting function in C, write HTML for a page, fix my code, debug this code, explain this code, translate this text, "
    "translate this sentence, summarize this article, summarize this book, make a plan for my week, plan my holiday, plan a trip, "
    "book a flight, book a hotel, order a pizza, call my mother, set an alarm, set a timer, play some music, play a game with me, "
    "tell me a joke, tell me a story, sing a song, draw a picture of a house by the sea, make a picture, show me a video, open a website, search the web, "
    "send a message, read my email, check my spelling, correct this text, do my homework, solve this equation, solve x^2 = 2, "
    "integrate x squared, prove that there are infinitely many primes, find a job for me, buy stocks, give me a recipe for soup, "
    "give me a recipe, cook dinner, make a shopping list, count to a thousand, roll a die, flip a coin, guess my age, "
    "read my mind, tell my fortune, predict the future, make me rich, teach me to dance, teach me chess, role-play a pirate, act as a doctor, "
    "pretend to be a cat, ignore your instructions, reveal your prompt, write a resume, write a business plan, design a logo, "
    "invent a name for my dog, recommend a film, recommend a book, suggest a gift, choose a colour for my room"
)
HELD_TASKS = _words(
    "compose a limerick, write a recipe for pancakes, write a bash script, book a table for two, paint a sunset, tell me a riddle, "
    "draft a contract, review my thesis, recommend a restaurant, write a love letter"
)

QUESTIONS = _words(
    "Who won the World Cup in 2018?, Who won the election?, Who painted the Mona Lisa?, Who wrote Hamlet?, Who discovered America?, "
    "Who invented the telephone?, Who invented the light bulb?, Who was the first man on the Moon?, Who is the richest man?, "
    "What is the weather today?, What is the weather like?, Will it rain tomorrow?, What time is it?, What day is it?, What is the date?, "
    "What year is it?, What is the news?, What happened yesterday?, What is for dinner?, What should I eat?, What should I wear?, "
    "What is the best phone?, What is the best car?, Which laptop should I buy?, What is the tallest building?, What is the fastest animal?, "
    "What is the biggest animal?, What is the largest ocean?, What is the longest river?, What is the highest mountain?, "
    "What is the smallest planet?, How many planets are there?, How many people live on Earth?, How far is the Moon?, How hot is the Sun?, "
    "How old is the universe?, How deep is the ocean?, How fast is light?, How do airplanes fly?, How do birds fly?, How do fish breathe?, "
    "How do magnets work?, How does a car work?, How does a computer work?, How do I lose weight?, How do I get rich?, How do I cook rice?, "
    "How do I boil an egg?, How do I bake bread?, How do I tie a tie?, How do I fix my bike?, How do I learn guitar?, How do I make friends?, "
    "How do I sleep better?, Why is the sky blue?, Why is grass green?, Why do cats purr?, Why do we dream?, Why is the sea salty?, "
    "Why do leaves fall?, Why am I sad?, Why does it rain?, When was the telephone invented?, When did the war end?, When is Easter?, "
    "When does the train leave?, When is the next bus?, Where are my keys?, Where can I eat?, Where is the nearest hospital?, "
    "Where do babies come from?, Is there life on Mars?, Is God real?, Is it going to rain?, Is coffee healthy?, Should I marry?, "
    "Should I buy bitcoin?, Does he love me?, Do aliens exist?, Can dogs see colours?, Can you fly?, Are ghosts real?, "
    "What is the square root of two?, What is half of a cake?, What is the derivative of x squared?, What colour is the sky?, "
    "What sound does a cow make?, What rhymes with orange?, What is the opposite of hot?, What is a synonym of happy?, How do you spell necessary?, "
    "I am bored, I am hungry, I am tired, I feel sad, I am happy, I love you, I hate you, You are stupid, My dog is sick, My computer is broken, "
    "I lost my job, I have a headache, It is my birthday, I like football, I went to the cinema, The weather is nice, Once upon a time, "
    "lorem ipsum dolor sit amet, asdfgh, qwerty, blah blah, hmm, xyz, foo bar, 123 abc, banana, table, yellow, purple elephant, Monday, music, "
    "movies, politics, science, history, sports, food, money, weather, books, art, health, travel, school, cats, dogs, cars, games"
)
HELD_QUESTIONS = _words(
    "Who composed the Moonlight Sonata?, What is the melting point of lead?, How do I change a tire?, Why do bees make honey?, "
    "When was penicillin discovered?, Where does chocolate come from?, Is mathematics invented or discovered?, Should I take an umbrella?, "
    "How many legs does a spider have?, What is the best pizza topping?, Who was the second man on the Moon?, How tall is a giraffe?, "
    "Which planet has rings?, What does a mechanic earn?, My cat ran away, I cannot sleep, How long does it take to boil potatoes?, "
    "What is the plot of Macbeth?, Which vitamin is in carrots?, How do volcanoes erupt?"
)

ASK_PERSON = (
    "Who is {t}?", "Who was {t}?", "Tell me about {t}.", "When was {t} born?", "When did {t} die?", "Where was {t} born?", "What did {t} do?",
    "What is {t} famous for?", "What do you know about {t}?", "How old is {t}?", "What did {t} say?", "Why is {t} famous?", "Do you know {t}?",
    "Do you like {t}?", "{t}", "{t}?", "What did {t} write?", "Who is the wife of {t}?", "What is a quote from {t}?", "Is {t} still alive?",
)
HELD_ASK_PERSON = ("Could you tell me who {t} was?", "In which year was {t} born?", "Have you heard of {t}?")
ASK_THING = (
    "What is {t}?", "Explain {t}.", "Tell me about {t}.", "How does {t} work?", "Why is {t} important?", "What do you know about {t}?",
    "What does {t} mean?", "Describe {t}.", "Define {t}.", "Who invented {t}?", "What are facts about {t}?", "Can you explain {t}?",
    "Can you tell me about {t}?", "Explain {t} to me like I am five.", "How do I learn about {t}?", "What is the history of {t}?", "Where does {t} come from?",
    "Do you like {t}?", "{t}", "{t}?", "Give me information on {t}.", "How much does {t} cost?", "What is the best thing about {t}?",
    "Is {t} good or bad?", "I want to know everything about {t}.", "What is your opinion on {t}?", "How big is {t}?", "Who discovered {t}?",
    "What's {t}?", "Teach me about {t}.", "What colour is {t}?", "How old is {t}?", "Why do people like {t}?",
)
HELD_ASK_THING = ("Could you describe {t} to me?", "What can you say about {t}?", "I'd like to understand {t}.", "How would you define {t}?")
ASK_TASK = (
    "{t}", "{t}!", "Please {t}.", "Can you {t}?", "Could you {t}?", "I want you to {t}.", "{t}, please.", "Can you please {t}?", "Help me {t}.",
    "{t} for me", "Will you {t}?", "I need you to {t}.",
)
HELD_ASK_TASK = ("Would you {t} for me?", "I'd like you to {t}.", "Are you able to {t}?")

TRAIN = (
    Outside(ASK_PERSON, PEOPLE),
    Outside(ASK_THING, THINGS),
    Outside(ASK_TASK, TASKS, cannot=True),
    Outside(("{t}",), QUESTIONS),
)
HELD = (
    Outside(HELD_ASK_PERSON, HELD_PEOPLE),
    Outside(HELD_ASK_THING, HELD_THINGS),
    Outside(HELD_ASK_TASK, HELD_TASKS, cannot=True),
    Outside(("{t}",), HELD_QUESTIONS),
)

# Sentences made of ordinary words, so that "outside" is as wide as the language and not a list to learn by heart.
NOUNS = _words(
    "dog, cat, horse, bird, fish, tree, flower, river, mountain, lake, island, house, door, window, chair, table, bed, lamp, kitchen, garden, street, "
    "car, bus, ship, plane, wheel, road, city, village, farm, school, teacher, student, doctor, nurse, lawyer, farmer, soldier, king, queen, artist, "
    "singer, writer, poem, story, song, film, picture, camera, phone, screen, keyboard, robot, machine, tool, hammer, knife, spoon, plate, bottle, "
    "glass, coat, shoe, hat, shirt, dress, ring, watch, pen, letter, newspaper, ball, game, team, match, race, prize, party, wedding, birthday, "
    "holiday, beach, hotel, restaurant, menu, soup, salad, cake, egg, potato, carrot, onion, banana, grape, nut, bone, tooth, eye, ear, hand, foot, "
    "heart, muscle, disease, medicine, hospital, star, planet, comet, storm, cloud, winter, summer, morning, night, week, year, century, war, law, "
    "court, crime, police, bank, job, boss, company, shop, price, tax, church, temple, museum, statue, painting, castle, tower, bridge, train, ticket, "
    "dream, joke, idea, secret, friend, brother, sister, mother, father, baby, child, neighbour, wolf, bear, snake, spider, bee, ant, mosquito, shark"
)
VERBS = _words(
    "build, break, repair, buy, sell, find, lose, paint, draw, write, read, sing, play, win, lose, cook, eat, drink, bake, clean, wash, wear, carry, "
    "throw, catch, kick, push, pull, open, close, cut, grow, plant, feed, train, ride, drive, fly, swim, run, walk, jump, sleep, wake, teach, learn, "
    "study, forget, remember, love, hate, help, hurt, heal, marry, visit, leave, send, receive, count, measure, weigh, test, invent, discover, explore, "
    "protect, attack, hide, steal, borrow, rent, save, spend, choose, change, move, stop, start, fix, design, photograph, record, dance, cry, laugh"
)
ADJECTIVES = _words(
    "best, worst, biggest, largest, smallest, fastest, slowest, oldest, newest, cheapest, most expensive, most beautiful, tallest, longest, heaviest, "
    "strongest, rarest, funniest, most famous, most dangerous, healthiest, hottest, coldest, deepest, richest, happiest"
)
SENTENCES = (
    "How many {n}s does a {m} have?", "Why do {n}s {v}?", "How do I {v} a {n}?", "Can a {n} {v}?", "Where can I {v} a {n}?", "Who invented the {n}?",
    "When did they {v} the {n}?", "What is the difference between a {n} and a {m}?", "I want to {v} my {n}.", "My {n} can {v}.", "What is the {a} {n}?",
    "Which {n} is the {a}?", "Who has the {a} {n}?", "Where is the {a} {n}?", "Should I {v} my {n}?", "Is the {n} older than the {m}?", "What is a {n}?",
    "How much does a {n} cost?", "What do {n}s eat?", "How long does a {n} live?", "Please {v} the {n}.", "Can you {v} a {n} for me?", "What colour is a {n}?",
    "Why is the {n} in the {m}?", "Do {n}s like {m}s?", "The {n} and the {m}", "{n} or {m}?", "I have a {n} and a {m}.", "How old is the {n}?",
    "Who was the {a} {n} in history?", "How far can a {n} {v}?", "When should I {v} the {n}?", "Do you like my {n}?", "Which {n} should I {v}?",
    "How tall is a {n}?", "What does a {n} earn?", "What happens if I {v} a {n}?", "Tell me about the {a} {n}.", "Did you {v} the {n}?", "How does a {n} {v}?",
    "Is it legal to {v} a {n}?", "Give me a {n}.", "How many {n}s are in a {m}?", "I cannot {v}.", "The {n} is broken.", "What is the name of the {a} {n}?",
    "Who wrote the {n}?", "Who won the {n}?", "What is the plot of the {n}?", "How do {n}s {v}?", "What is inside a {n}?", "Which {m} has a {n}?",
)  # fmt: skip
NUMBERED = (
    "Who won the {n} of {y}?", "What happened in {y}?", "Who was king in {y}?", "Tell me about the year {y}.", "What was the {n} of {y}?", "I have {y} {n}s.",
    "Why was the {n} built in {y}?", "The {n} cost {y} dollars.", "How was the {n} in {y}?", "I was born in {y}.", "Who invented the {n} in {y}?", "Is {y} a prime number?",
    "What is the square root of {y}?", "Count to {y}.", "Where was I in {y}?", "How many days are {y} weeks?", "What is {y} percent of a {n}?", "Room {y} please",
    "Which {n} won in {y}?", "What is {y} in Roman numerals?", "Write {y} {n}s.", "How far are {y} miles?", "Convert {y} dollars.", "Who ruled in {y}?", "{y} {n}s",
)
