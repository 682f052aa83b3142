"""Templates of the word problems, filled in by problems.py.

A row is (name, draws, questions, answers, result). Draws: `a=3-40` is a random whole number, `t=a*b` a
value, `a>b` a condition. Braces hold a drawn value, a piece of arithmetic, a person (N, M, he, his ...) or a
word from a list (`{fruit}`, plural `{fruits}`).
"""

Row = tuple[str, str, list[str], list[str], str]

TRAIN: list[Row] = [
    (
        "more",
        "a=3-40 b=2-30",
        [
            "{N} has {a} {fruits}. {He} buys {b} more. How many {fruits} does {he} have now?",
            "{N} picked {a} {fruits} in the morning and {b} in the afternoon. How many {fruits} did {he} pick?",
        ],
        ["{N} has {a} + {b} = {a+b} {fruits}.", "We add the two numbers. {a} + {b} = {a+b} {fruits}."],
        "a+b",
    ),
    (
        "fewer",
        "a=12-60 b=2-30 a>b+2",
        [
            "{N} had {a} {toys}. {He} gave {b} of them to {M}. How many {toys} are left?",
            "There were {a} {toys} in a box. {N} took out {b}. How many {toys} are still in the box?",
        ],
        [
            "{N} took away {b} of the {a} {toys}. {a} - {b} = {a-b} {toys} are left.",
            "We subtract. {a} - {b} = {a-b} {toys}.",
        ],
        "a-b",
    ),
    (
        "boxes",
        "a=2-12 b=2-12",
        [
            "{N} has {a} boxes with {b} {toys} in each box. How many {toys} does {he} have in all?",
            "Each box holds {b} {toys}. {N} fills {a} boxes. How many {toys} are in the boxes?",
        ],
        ["Each of the {a} boxes has {b} {toys}. {a} * {b} = {a*b} {toys}.", "{N} has {a} * {b} = {a*b} {toys}."],
        "a*b",
    ),
    (
        "share",
        "n=2-10 q=2-12 t=n*q",
        [
            "{N} shares {t} {sweets} equally among {n} friends. How many {sweets} does each friend get?",
            "{n} children share {t} {sweets} equally. How many {sweets} does each child get?",
        ],
        ["Each one gets {t} / {n} = {q} {sweets}.", "We divide {t} by {n}. {t} / {n} = {q} {sweets}."],
        "q",
    ),
    (
        "price",
        "p=2-15 n=2-12",
        [
            "A {fruit} pie costs ${p}. {N} buys {n} pies. How much does {he} pay?",
            "{N} buys {n} {fruit} pies at ${p} each. How many dollars does {he} spend?",
        ],
        ["{n} pies cost {n} * {p} = ${n*p}.", "One pie costs ${p}, so {N} pays {n} * ${p} = ${n*p}."],
        "n*p",
    ),
    (
        "change",
        "p=2-12 n=2-6 m=20-100 m>n*p",
        [
            "{N} has ${m}. {He} buys {n} {drinks} for ${p} each. How many dollars does {he} have left?",
            "A {drink} costs ${p}. {N} pays for {n} of them with ${m}. How much change does {he} get?",
        ],
        [
            "The {drinks} cost {n} * {p} = ${n*p}. {N} has {m} - {n*p} = ${m-n*p} left.",
            "First, {n} * ${p} = ${n*p}. Then ${m} - ${n*p} = ${m-n*p}.",
        ],
        "m-n*p",
    ),
    (
        "twice",
        "a=2-30 k=2-4",
        [
            "{N} has {a} {toys}. {M} has {k} times as many. How many {toys} do they have together?",
            "{M} has {k} times as many {toys} as {N}. {N} has {a}. How many {toys} do they have in total?",
        ],
        [
            "{M} has {k} * {a} = {k*a} {toys}. Together they have {a} + {k*a} = {a+k*a} {toys}.",
            "{k} * {a} = {k*a}, so {M} has {k*a}. In total that is {k*a} + {a} = {a+k*a} {toys}.",
        ],
        "a+k*a",
    ),
    (
        "more_than",
        "a=5-40 b=2-20",
        [
            "{N} read {a} pages. {M} read {b} pages more than {N}. How many pages did they read in all?",
            "{M} read {b} more pages than {N}, who read {a} pages. How many pages did the two read together?",
        ],
        ["{M} read {a} + {b} = {a+b} pages. In all they read {a} + {a+b} = {2*a+b} pages."],
        "2*a+b",
    ),
    (
        "less_than",
        "a=12-50 b=2-10",
        ["{N} found {a} {finds} on the beach. {M} found {b} fewer. How many {finds} did they find together?"],
        [
            "{M} found {a} - {b} = {a-b} {finds}. Together they found {a} + {a-b} = {2*a-b} {finds}.",
            "First we find how many {M} has. {a} - {b} = {a-b}. Then {a} + {a-b} = {2*a-b} {finds}.",
        ],
        "2*a-b",
    ),
    (
        "half",
        "h=3-30 a=2*h",
        [
            "{N} baked {a} {bakes}. {He} gave half of them to {M}. How many {bakes} did {he} keep?",
            "There are {a} {bakes} on a plate. The children eat half of them. How many {bakes} are left?",
        ],
        ["Half of {a} is {a} / 2 = {h}. So {a} - {h} = {a-h} {bakes} are left.", "{a} / 2 = {h} {bakes}."],
        "h",
    ),
    (
        "half_more",
        "h=3-25 a=2*h",
        ["{N} sold {a} {bakes} on {day} and half as many on the next day. How many {bakes} did {he} sell in all?"],
        [
            "On the next day {N} sold {a} / 2 = {h} {bakes}. In all {he} sold {a} + {h} = {a+h} {bakes}.",
            "{a} / 2 = {h} and {a} + {h} = {a+h}, so {he} sold {a+h} {bakes}.",
        ],
        "a+h",
    ),
    (
        "wage",
        "w=6-20 h=2-9 d=2-6",
        [
            "{N} earns ${w} an hour. {He} works {h} hours a day for {d} days. How much does {he} earn?",
            "{N} works {d} days, {h} hours each day, and gets ${w} an hour. How many dollars does {he} get?",
        ],
        [
            "{N} works {h} * {d} = {h*d} hours. {He} earns {h*d} * {w} = ${h*d*w}.",
            "In a day {he} earns {h} * {w} = ${h*w}. In {d} days {he} earns {d} * {h*w} = ${d*h*w}.",
        ],
        "w*h*d",
    ),
    (
        "speed",
        "v=4-60 t=2-6",
        [
            "A {vehicle} goes {v} miles an hour. How many miles does it go in {t} hours?",
            "{N} rides in a {vehicle} for {t} hours at {v} miles an hour. How far does {he} go?",
        ],
        ["It goes {v} * {t} = {v*t} miles.", "The distance is speed times time. {v} * {t} = {v*t} miles."],
        "v*t",
    ),
    (
        "eggs",
        "h=3-12 e=2-6 u=2-15 h*e>u",
        [
            "A farmer has {h} hens. Each hen lays {e} eggs a week. The family eats {u} eggs a week. How many "
            "eggs are left?",
            "{N} keeps {h} hens that lay {e} eggs each every week. {He} uses {u} eggs. How many eggs can {he} sell?",
        ],
        [
            "The hens lay {h} * {e} = {h*e} eggs. After taking {u} away, {h*e} - {u} = {h*e-u} eggs are left.",
            "{h} * {e} = {h*e} eggs. {h*e} - {u} = {h*e-u} eggs.",
        ],
        "h*e-u",
    ),
    (
        "rows",
        "r=3-12 c=3-12 x=2-9",
        ["A hall has {r} rows of {c} chairs. {N} brings {x} more chairs. How many chairs are in the hall now?"],
        [
            "At first there are {r} * {c} = {r*c} chairs. With {x} more there are {r*c} + {x} = {r*c+x} chairs.",
            "{r} * {c} = {r*c}. {r*c} + {x} = {r*c+x} chairs.",
        ],
        "r*c+x",
    ),
    (
        "bus",
        "a=10-40 b=2-9 c=2-15 a>b",
        [
            "A bus has {a} people on it. At a stop {b} people get off and {c} people get on. How many people are "
            "on the bus?",
            "There are {a} people on a bus. Then {b} leave and {c} come in. How many people are on the bus now?",
        ],
        [
            "After {b} leave, {a} - {b} = {a-b} people are on the bus. After {c} get on, {a-b} + {c} = {a-b+c} people.",
            "{a} - {b} = {a-b}. {a-b} + {c} = {a-b+c} people.",
        ],
        "a-b+c",
    ),
    (
        "weeks",
        "a=2-12 w=2-8",
        [
            "{N} saves ${a} every week. How many dollars does {he} save in {w} weeks?",
            "Every week {N} puts ${a} into a jar. How much is in the jar after {w} weeks?",
        ],
        ["{N} saves {a} * {w} = ${a*w}.", "In {w} weeks {he} saves {w} * {a} = ${a*w}."],
        "a*w",
    ),
    (
        "saving_time",
        "a=2-12 w=2-10 p=a*w",
        [
            "{N} wants a {toy} that costs ${p}. {He} saves ${a} a week. How many weeks does {he} need?",
            "A {toy} costs ${p}. If {N} saves ${a} each week, after how many weeks can {he} buy it?",
        ],
        ["{N} needs {p} / {a} = {w} weeks.", "We divide the price by the savings. {p} / {a} = {w} weeks."],
        "w",
    ),
    (
        "saving_rest",
        "a=2-9 w=2-9 s=3-20 p=a*w+s",
        [
            "{N} wants to buy a {toy} for ${p}. {He} already has ${s} and saves ${a} a week. How many weeks must "
            "{he} save?"
        ],
        [
            "{N} still needs {p} - {s} = ${p-s}. That takes {p-s} / {a} = {w} weeks.",
            "First, ${p} - ${s} = ${p-s}. Then {p-s} / {a} = {w} weeks.",
        ],
        "w",
    ),
    (
        "two_prices",
        "a=2-9 m=2-6 b=2-12 n=2-6",
        [
            "{N} buys {m} {fruits} at ${a} each and {n} {drinks} at ${b} each. How much does {he} spend in all?",
            "A {fruit} costs ${a} and a {drink} costs ${b}. What do {m} {fruits} and {n} {drinks} cost together?",
        ],
        [
            "The {fruits} cost {m} * {a} = ${m*a}. The {drinks} cost {n} * {b} = ${n*b}. "
            "In all that is {m*a} + {n*b} = ${m*a+n*b}.",
            "{m} * ${a} = ${m*a} and {n} * ${b} = ${n*b}. ${m*a} + ${n*b} = ${m*a+n*b}.",
        ],
        "m*a+n*b",
    ),
    (
        "legs",
        "c=2-12 d=2-15",
        [
            "A farm has {c} cows and {d} ducks. How many legs do they have in all?",
            "{N} sees {c} cows and {d} ducks in a field. How many legs are there together?",
        ],
        [
            "Cows have 4 legs, so {c} * 4 = {4*c} legs. Ducks have 2 legs, so {d} * 2 = {2*d} legs. "
            "{4*c} + {2*d} = {4*c+2*d} legs."
        ],
        "4*c+2*d",
    ),
    (
        "age_later",
        "a=4-40 y=2-20",
        ["{N} is {a} years old. How old will {he} be in {y} years?"],
        ["In {y} years {N} will be {a} + {y} = {a+y} years old.", "We add the years. {a} + {y} = {a+y}."],
        "a+y",
    ),
    (
        "age_pair",
        "a=4-20 b=2-15",
        [
            "{N} is {a} years old. {M} is {b} years older. What is the sum of their ages?",
            "{M} is {b} years older than {N}, who is {a}. How many years do they have together?",
        ],
        ["{M} is {a} + {b} = {a+b} years old. The sum is {a} + {a+b} = {2*a+b}."],
        "2*a+b",
    ),
    (
        "pages_left",
        "p=5-25 d=2-6 t=60-200 t>p*d",
        [
            "A book has {t} pages. {N} reads {p} pages a day for {d} days. How many pages are left?",
            "{N} reads {p} pages of a {t}-page book every day. How many pages are left after {d} days?",
        ],
        [
            "{N} reads {p} * {d} = {p*d} pages. So {t} - {p*d} = {t-p*d} pages are left.",
            "After {d} days {he} has read {d} * {p} = {p*d} pages. {t} - {p*d} = {t-p*d} pages.",
        ],
        "t-p*d",
    ),
    (
        "pages_days",
        "p=4-20 d=3-12 t=p*d",
        ["A book has {t} pages and {N} reads {p} pages a day. In how many days does {he} finish it?"],
        ["{N} needs {t} / {p} = {d} days.", "We divide the pages by the pages a day. {t} / {p} = {d} days."],
        "d",
    ),
    (
        "dozen",
        "d=2-8 u=2-12",
        [
            "{N} buys {d} dozen eggs and uses {u} of them. How many eggs are left?",
            "There are {d} dozen {bakes} on a table. {N} eats {u}. How many are still there?",
        ],
        [
            "A dozen is 12, so there are {d} * 12 = {12*d}. Then {12*d} - {u} = {12*d-u} are left.",
            "{d} * 12 = {12*d}. {12*d} - {u} = {12*d-u}.",
        ],
        "12*d-u",
    ),
    (
        "minutes",
        "h=2-6 m=5-50",
        [
            "A film lasts {h} hours and {m} minutes. How many minutes is that?",
            "{N} walks for {h} hours and {m} minutes. How many minutes does {he} walk?",
        ],
        [
            "An hour has 60 minutes, so {h} hours are {h} * 60 = {60*h} minutes. {60*h} + {m} = {60*h+m} minutes.",
            "{h} * 60 = {60*h} and {60*h} + {m} = {60*h+m} minutes.",
        ],
        "60*h+m",
    ),
    (
        "teams",
        "n=2-8 k=3-11 t=n*k",
        [
            "{t} children make teams of {k}. How many teams are there?",
            "A class of {t} children plays a game in teams of {k} children. How many teams can they make?",
        ],
        ["There are {t} / {k} = {n} teams.", "Each team needs {k} children. {t} / {k} = {n} teams."],
        "n",
    ),
    (
        "pack_shelf",
        "s=2-9 b=3-15 g=2-12 s*b>g",
        ["A shelf unit has {s} shelves with {b} books on each. {N} borrows {g} books. How many books are left?"],
        [
            "There are {s} * {b} = {s*b} books. After {N} borrows {g}, {s*b} - {g} = {s*b-g} books are left.",
            "{s} * {b} = {s*b} books. {s*b} - {g} = {s*b-g} books.",
        ],
        "s*b-g",
    ),
    (
        "three_days",
        "a=2-20 b=2-20 c=2-20",
        [
            "{N} ran {a} miles in the first week, {b} in the second and {c} in the third. How many miles did {he} run?",
            "{N} caught {a} fish on {day}, {b} the day after and {c} on the third day. How many fish did {he} catch?",
        ],
        ["{a} + {b} = {a+b} and {a+b} + {c} = {a+b+c}.", "We add all three. {a} + {b} + {c} = {a+b+c}."],
        "a+b+c",
    ),
    (
        "doubling",
        "a=2-20",
        [
            "{N} plants {a} {flowers} on {day}. The next day {he} plants twice as many. How many {flowers} are "
            "there in all?",
            "On {day} {N} waters {a} {flowers}, and on the next day twice that number. How many is that in total?",
        ],
        ["The next day it is 2 * {a} = {2*a} {flowers}. In all that makes {a} + {2*a} = {3*a} {flowers}."],
        "3*a",
    ),
    (
        "gift_split",
        "p=3-20 n=2-6 t=p*n",
        ["{n} friends buy a gift for {M} that costs ${t}. They share the cost equally. How much does each friend pay?"],
        ["Each friend pays {t} / {n} = ${p}.", "The cost is shared by {n} friends. ${t} / {n} = ${p} each."],
        "p",
    ),
    (
        "discount",
        "p=10-60 d=2-9 n=2-5",
        [
            "A {wear} costs ${p}. The shop takes ${d} off the price. How much do {n} of these {wears} cost?",
            "{N} buys {n} {wears}. Each costs ${p}, but {he} gets ${d} off each one. How much does {he} pay?",
        ],
        [
            "One {wear} costs {p} - {d} = ${p-d}. {n} of them cost {n} * {p-d} = ${n*(p-d)}.",
            "The new price is ${p} - ${d} = ${p-d}. {n} * ${p-d} = ${n*(p-d)}.",
        ],
        "n*(p-d)",
    ),
    (
        "profit",
        "n=3-15 c=2-6 p=4-12 p>c",
        ["{N} buys {n} {flowers} for ${c} each and sells them for ${p} each. How much money does {he} make?"],
        [
            "{N} makes {p} - {c} = ${p-c} on each one. With {n} {flowers} that is {n} * {p-c} = ${n*(p-c)}.",
            "{He} pays {n} * {c} = ${n*c} and gets {n} * {p} = ${n*p}. {n*p} - {n*c} = ${n*(p-c)}.",
        ],
        "n*(p-c)",
    ),
    (
        "tank",
        "a=20-90 r=2-9 t=2-9 a>r*t",
        [
            "A tank holds {a} liters of water. It loses {r} liters an hour. How much water is left after {t} hours?",
            "{N} has a tank with {a} liters of water. Each hour {r} liters run out. How many liters are left "
            "after {t} hours?",
        ],
        ["In {t} hours the tank loses {r} * {t} = {r*t} liters. {a} - {r*t} = {a-r*t} liters are left."],
        "a-r*t",
    ),
    (
        "fill",
        "r=2-9 t=2-9 s=2-20",
        [
            "A pool has {s} liters of water in it. {N} adds {r} liters a minute for {t} minutes. How many liters "
            "are there?"
        ],
        [
            "{N} adds {r} * {t} = {r*t} liters. Then there are {s} + {r*t} = {s+r*t} liters.",
            "{r} * {t} = {r*t} and {s} + {r*t} = {s+r*t} liters.",
        ],
        "s+r*t",
    ),
    (
        "perimeter",
        "l=3-30 w=2-20 l>w",
        [
            "A garden is {l} feet long and {w} feet wide. How many feet of fence go around it?",
            "{N} walks once around a field that is {l} feet long and {w} feet wide. How many feet does {he} walk?",
        ],
        ["One long and one short side are {l} + {w} = {l+w} feet. All sides are 2 * {l+w} = {2*(l+w)} feet."],
        "2*(l+w)",
    ),
    (
        "area",
        "l=3-15 w=2-12",
        ["A room is {l} feet long and {w} feet wide. How many square feet is the floor?"],
        ["The area is length times width. {l} * {w} = {l*w} square feet.", "{l} * {w} = {l*w} square feet."],
        "l*w",
    ),
    (
        "bags_rest",
        "b=2-8 k=3-10 r=2-9",
        [
            "{N} fills {b} bags with {k} {finds} each and has {r} {finds} left over. How many {finds} did {he} have?",
            "After {N} puts {k} {finds} into each of {b} bags, {r} {finds} remain. How many {finds} were there "
            "at first?",
        ],
        ["In the bags there are {b} * {k} = {b*k} {finds}. With the rest there were {b*k} + {r} = {b*k+r} {finds}."],
        "b*k+r",
    ),
    (
        "before",
        "a=3-30 b=2-30",
        [
            "{N} gave {b} {sweets} to {M} and has {a} left. How many {sweets} did {he} have at first?",
            "After giving away {b} {sweets}, {N} has {a} {sweets}. How many did {he} start with?",
        ],
        ["{N} had {a} + {b} = {a+b} {sweets} at first.", "We add them back. {a} + {b} = {a+b} {sweets}."],
        "a+b",
    ),
    (
        "difference",
        "a=10-60 b=2-50 a>b+1",
        ["{N} has {a} {finds} and {M} has {b}. How many more {finds} does {N} have than {M}?"],
        ["{N} has {a} - {b} = {a-b} more {finds}.", "The difference is {a} - {b} = {a-b}."],
        "a-b",
    ),
    (
        "tickets",
        "a=2-5 p=6-15 c=2-7 q=2-5 p>q",
        ["A ticket costs ${p} for an adult and ${q} for a child. What do {a} adults and {c} children pay in all?"],
        [
            "The adults pay {a} * {p} = ${a*p}. The children pay {c} * {q} = ${c*q}. In all they pay "
            "{a*p} + {c*q} = ${a*p+c*q}."
        ],
        "a*p+c*q",
    ),
    (
        "grow",
        "a=5-40 r=2-6 w=2-9",
        [
            "A plant is {a} inches tall. It grows {r} inches every week. How tall is it after {w} weeks?",
            "{N} has a plant that is {a} inches tall and grows {r} inches a week. How many inches is it in {w} weeks?",
        ],
        ["It grows {r} * {w} = {r*w} inches. Then it is {a} + {r*w} = {a+r*w} inches tall."],
        "a+r*w",
    ),
    (
        "broken",
        "b=2-9 k=4-12 x=2-9 b*k>x",
        ["{N} orders {b} packs of {k} cups. When they arrive, {x} cups are broken. How many cups are whole?"],
        [
            "There are {b} * {k} = {b*k} cups. {x} are broken, so {b*k} - {x} = {b*k-x} cups are whole.",
            "{b} * {k} = {b*k} and {b*k} - {x} = {b*k-x} cups.",
        ],
        "b*k-x",
    ),
    (
        "third",
        "h=2-15 a=3*h",
        ["{N} has {a} {finds}. One third of them are white. How many are not white?"],
        [
            "One third of {a} is {a} / 3 = {h}. So {a} - {h} = {a-h} {finds} are not white.",
            "{a} / 3 = {h} are white. {a} - {h} = {a-h} are not.",
        ],
        "a-h",
    ),
]

HELD_OUT: list[Row] = [
    (
        "birds",
        "a=8-30 b=2-6 c=2-15 a>b",
        ["{a} birds sit in a tree. {b} birds fly away and then {c} birds come. How many birds are in the tree now?"],
        ["{a} - {b} = {a-b} birds stay. {a-b} + {c} = {a-b+c} birds."],
        "a-b+c",
    ),
    (
        "slices",
        "p=2-6 s=4-10 e=2-9 p*s>e",
        ["{N} cuts {p} pizzas into {s} slices each. The guests eat {e} slices. How many slices are left?"],
        ["There are {p} * {s} = {p*s} slices. {p*s} - {e} = {p*s-e} slices are left."],
        "p*s-e",
    ),
    (
        "library",
        "d=2-8 c=2-6 n=2-5",
        [
            "A library asks for {c} cents a day for a late book. {N} brings back {n} books {d} days late. "
            "How many cents does {he} pay?"
        ],
        ["One book costs {c} * {d} = {c*d} cents. {n} books cost {n} * {c*d} = {n*c*d} cents."],
        "n*c*d",
    ),
    (
        "coins",
        "q=2-9 n=2-9",
        ["{N} has {q} coins of 5 cents and {n} coins of 10 cents. How many cents is that in all?"],
        ["{q} * 5 = {5*q} cents and {n} * 10 = {10*n} cents. {5*q} + {10*n} = {5*q+10*n} cents."],
        "5*q+10*n",
    ),
    (
        "rope",
        "n=2-8 k=2-9 r=2-6 t=n*k+r",
        ["A rope is {t} meters long. {N} cuts off {n} pieces of {k} meters each. How many meters are left?"],
        ["The pieces are {n} * {k} = {n*k} meters long. {t} - {n*k} = {r} meters are left."],
        "r",
    ),
    (
        "bottles",
        "b=2-9 c=2-8 m=2-9",
        ["{N} collects {b} bottles on each of {c} days. {M} gives {him} {m} more. How many bottles does {he} have?"],
        ["{b} * {c} = {b*c} bottles. {b*c} + {m} = {b*c+m} bottles."],
        "b*c+m",
    ),
    (
        "candles",
        "n=2-6 k=3-9 u=2-5 n*k>u",
        ["{N} buys {n} packs of {k} candles and lights {u} of them. How many candles has {he} not used?"],
        ["{N} has {n} * {k} = {n*k} candles. {n*k} - {u} = {n*k-u} candles are not used."],
        "n*k-u",
    ),
    (
        "stairs",
        "f=2-9 s=8-20",
        [
            "A house has {f} floors with {s} steps between one floor and the next. {N} climbs from the street to "
            "the top, "
            "which is {f} times {s} steps. How many steps does {he} climb?"
        ],
        ["{N} climbs {f} * {s} = {f*s} steps."],
        "f*s",
    ),
    (
        "stamps",
        "h=2-20 a=2*h b=2-15",
        [
            "{N} has {a} stamps. {He} gives half of them to {M} and then finds {b} new ones. How many stamps "
            "does {he} have?"
        ],
        ["Half of {a} is {a} / 2 = {h}. {h} + {b} = {h+b} stamps."],
        "h+b",
    ),
    (
        "score",
        "a=2-9 p=2-3 m=2-12",
        [
            "In a game {N} throws {a} balls into a basket for {p} points each. {M} gets {m} points. How many "
            "points do they "
            "have together?"
        ],
        ["{N} gets {a} * {p} = {a*p} points. {a*p} + {m} = {a*p+m} points."],
        "a*p+m",
    ),
]
