"""Requests for longer answers: write, explain, compare, compute.

The base was not trained on these. Draft heads are, so that they also see its long and repetitive responses.
"""

import itertools
import random

# A request and what it is filled with; every combination of the fields is one prompt.
REQUESTS: list[tuple[str, dict[str, str]]] = [
    ("Explain {x} to {who}.", {
        "x": "how a bicycle stays upright|why the sky is blue|what inflation is|how vaccines work|what a database is"
             "|why leaves change colour|how tides come about|what an algorithm is|how bread rises|what a mortgage is",
        "who": "a child|a friend who has never heard of it|someone who is in a hurry",
    }),
    ("Write {form} about {x}.", {
        "form": "a short essay|a poem|a blog post|an outline for a talk|a paragraph|a dialogue between two friends",
        "x": "a walk by the river|the first day at a new job|a lost umbrella|the history of tea|learning to swim"
             "|a night train|moving to another town",
    }),
    ("Write {form} to {who} about {x}.", {
        "form": "an email|a polite letter|a short message",
        "who": "my landlord|a colleague|the town library|my neighbour",
        "x": "a broken heater|a meeting that has to move|a book that was lost|a party on Saturday",
    }),
    ("Compare {x}. Which is better, and why?", {
        "x": "trains and buses|tea and coffee|living in a village and living in a city|paper books and e-books"
             "|working alone and working in a team|summer and winter holidays|cats and dogs as pets"
             "|solar power and wind power",
    }),
    ("What are the advantages and disadvantages of {x}? Give three of each.", {
        "x": "school uniforms|electric cars|working from home|big cities|social media|fast food|small shops|flying",
    }),
    ("Write a {language} function that {x}.", {
        "language": "Python|JavaScript|C++",
        "x": "adds up the even numbers in a list|reverses the words of a sentence|counts how often each letter occurs"
             "|checks whether a number is prime|finds the largest gap between two numbers of a list"
             "|turns minutes into hours and minutes|merges two dictionaries|removes blank lines from a text",
    }),
    ("How would you implement {x}? Show the code and explain each step.", {
        "x": "a stack|a shopping cart|a word counter|a to-do list|a simple calculator|a guessing game",
    }),
    ("{p}% of the {n} {x} are {y}. How many are not {y}? Explain your reasoning.", {
        "p": "10|20|25|40|75", "n": "40|80|120|200",
        "x": "flowers in the garden|houses on the street|cars in the lot", "y": "red|white",
    }),
    ("A {shape} has {d}. What is its area, and what is its perimeter?", {
        "shape": "rectangle|garden|sheet of paper",
        "d": "sides of 4 and 9|sides of 12 and 5|a width of 7 and a length of 10",
    }),
    ("There are {a} red and {b} blue balls in a bag. What is the probability of drawing a {c} ball?", {
        "a": "2|3|5", "b": "4|6|7", "c": "red|blue",
    }),
    ("Solve for x: {a}x + {b} = {c}. Show all steps.", {"a": "2|3|5", "b": "4|7", "c": "19|34|52"}),
    ("Summarize this in one sentence: {x}", {
        "x": "The market opened late because of the rain, and most of the stalls were empty by noon."
             "|The team lost its first four games, changed its coach in spring and ended the season in second place."
             "|The bridge was built of wood, burned down twice and was at last rebuilt in stone."
             "|The company sold its old factory, hired forty people and moved into a smaller building.",
    }),
    ("List the names and numbers in this text as JSON: {x}", {
        "x": "Mira paid 12 dollars and Jon paid 30.|Room 4 has 18 seats, room 9 has 25."
             "|The train left Ulm at 7 and reached Bern at 11.|Ada is 36, Emil is 41 and Rosa is 9.",
    }),
    ("Imagine you are {who}. {x}", {
        "who": "a museum guide|a retired detective|a talking tree|a chef on television|a ship's captain",
        "x": "Describe your morning.|Tell us about your greatest mistake.|Convince me to hire you."
             "|Answer a letter from an old friend.",
    }),
    ("Who was {x}, and what is this person known for?", {
        "x": "Marie Curie|Isaac Newton|Cleopatra|Florence Nightingale|Alan Turing|Galileo",
    }),
    ("What caused {x}, and what came of it?", {
        "x": "the industrial revolution|the fall of Rome|the invention of printing|the gold rush|"
        "the great fire of London",
    }),
    ("How does {x} work? Go through it step by step.", {
        "x": "a refrigerator|photosynthesis|a steam engine|an election|a battery|the water cycle|a zipper|a telescope",
    }),
    ("Give me {n} ideas for {x}, and say why each of them is good.", {
        "n": "three|five", "x": "a rainy afternoon|a birthday present|saving money|a school project|a healthy lunch",
    }),
]  # fmt: skip


def prompts() -> list[dict]:
    """Return every request with every filling once, mixed."""
    made = []
    for request, fields in REQUESTS:
        for chosen in itertools.product(*(values.split("|") for values in fields.values())):
            made.append({"topic": "task", "prompt": request.format(**dict(zip(fields, chosen, strict=True)))})
    random.Random("tasks").shuffle(made)
    return made
