"""Templates of small talk by topic, written for this project and filled in by chat.py.

A topic has items (one line each, fields split by |: {x}, {a}, {b}, {c}), prompts, and answers. A backslash
joins a long line to the next. Held-out topics have no answers, as no model is trained on them.
"""

Topic = dict[str, list[str]]


def _topic(items: str, prompts: str, answers: str = "") -> Topic:
    parts = {"items": items, "prompts": prompts, "answers": answers}
    lines = {name: text.strip().splitlines() for name, text in parts.items()}
    return {name: [" ".join(line.split()) for line in found] for name, found in lines.items()}


TRAIN: dict[str, Topic] = {
    "greeting": _topic(
        "morning|a fresh start\nafternoon|a nice break\nevening|a quiet end to the day\nday|a good time",
        """Hello! Good {x} to you.
        Hi there, how is your {x} going?
        Hey, good {x}! How are you?
        Good {x}! What can you do for me?
        Hi! I just wanted to wish you a nice {x}.""",
        """Hello, and good {x} to you too! How can I help?
        Hi! My {x} is going well, thank you. What would you like to talk about?
        Good {x}! I can chat with you, tell a short story or work on a small problem with numbers.
        Hello! I am doing fine. I hope your {x} is {a}.
        Hi there! It is nice to hear from you. Tell me what you need.""",
    ),
    "thanks": _topic(
        "the help\nthe good idea\nyour time\nthe story\nthe nice answer\nthe list",
        """Thank you for {x}!
        Thanks for {x}, that is all for today.
        I wanted to say thanks for {x}. Goodbye!
        That was great. Thanks for {x}.""",
        """You are welcome! I was happy to help.
        You are welcome. Have a lovely day, and come back soon!
        My pleasure. Goodbye, and take care!
        Any time! I am glad that you liked it.
        No problem at all. See you next time!""",
    ),
    "food": _topic(
        """pasta|tomato sauce and basil|cook it in salted water for ten minutes
        rice|beans and a little lime|rinse it first and cook it slowly with the lid on
        soup|fresh bread|let it simmer on low heat with carrots and onions
        pancakes|honey and berries|mix flour, milk and eggs and fry them in butter
        salad|olive oil and lemon|wash the leaves well and add the dressing last
        an omelette|cheese and herbs|beat three eggs and cook them slowly in a pan
        potatoes|butter and salt|boil them until they are soft
        a sandwich|cheese and a slice of tomato|use fresh bread and toast it for a minute
        pizza|mushrooms and olives|roll the dough thin and bake it very hot
        porridge|cinnamon and a sliced apple|cook the oats in milk and stir often
        roast chicken|potatoes and green beans|bake it for an hour and let it rest""",
        """What goes well with {x}?
        How do I make {x}?
        I want to cook {x} tonight. Any tips?
        Do you like {x}?
        Can you give me a simple idea for {x}?
        My family loves {x}. What should I serve with it?""",
        """{X} goes very well with {a}.
        Try it with {a}. Also, {b}.
        It is easy. You {b}, and then you serve it with {a}.
        {X} is a great choice. I would serve it with {a}.
        Many people like {x} with {a}. A good tip is to {b}.""",
    ),
    "weather": _topic(
        """rain|an umbrella and good shoes|read a book by the window
        snow|a warm coat and gloves|build a snowman
        sunshine|a hat and some water|have a picnic in the park
        wind|a jacket that closes well|fly a kite
        fog|a bright scarf|drink a hot tea at home
        frost|a thick sweater and a scarf|bake a cake
        a storm|a flashlight|play a board game inside
        hot weather|light clothes and cold water|swim in the lake""",
        """What should I wear in {x}?
        We will get {x} tomorrow. What can I do?
        Do you like {x}?
        I am tired of {x}. What should I do today?
        What do I need for a walk in {x}?""",
        """In {x} you should take {a}.
        You need {a}. If you would rather stay close to home, you can {b}.
        {X} can be nice too. It is a good time to {b}.
        Take {a} with you and enjoy the fresh air.
        When there is {x}, I would {b}. Just do not forget {a}.""",
    ),
    "animals": _topic(
        """dog|a long walk|loyal and playful
        cat|a warm place to sleep|calm and curious
        rabbit|fresh hay and clean water|quiet and gentle
        goldfish|clean water and a little food|peaceful to watch
        hamster|a wheel to run in|small and busy at night
        parrot|a large cage and company|clever and loud
        turtle|a tank with a warm lamp|slow and patient
        guinea pig|hay, vegetables and a friend|friendly and a bit shy
        horse|a field and good hay|strong and gentle
        chicken|grain and a safe house|useful and funny""",
        """What does a {x} need?
        Is a {x} a good pet for a child?
        Tell me something about the {x}.
        I want to get a {x}. What should I know?
        How do I take care of a {x}?
        Why do people like to keep a {x}?""",
        """A {x} needs {a}. It is {b}.
        A {x} is {b}, so many families like it. Make sure that it has {a}.
        The most important thing is {a}. A {x} is {b}.
        A {x} can be a fine pet if you have time for it. It needs {a} and a bit of love.
        People like the {x} because it is {b}. Just make sure that it gets {a}.""",
    ),
    "hobbies": _topic(
        """painting|a brush and three colors|paint one small picture a week
        knitting|two needles and soft wool|knit a simple scarf
        chess|a board and a friend|play one slow game each day
        running|good shoes|run for ten minutes and walk for five
        cooking|a sharp knife and a pan|learn one new dish a week
        reading|a library card|read ten pages before bed
        photography|a simple camera|take one picture of the same tree every day
        drawing|a pencil and paper|draw your own hand
        fishing|a rod and a lot of patience|go out early in the morning
        hiking|strong shoes and a map|start with a short path
        baking|flour, sugar and an oven|bake a plain cake first
        writing|a notebook and a pen|write one page each morning""",
        """How do I start with {x}?
        Is {x} a good hobby?
        I want to try {x}. What do I need?
        Give me a tip for {x}.
        Why do people enjoy {x}?
        I am bored and thinking about {x}. What do you think?""",
        """To start with {x} you only need {a}. Then {b}.
        {X} is a lovely hobby because it calms the mind. A good first step is to {b}.
        You need {a}. After that, {b} and be patient with yourself.
        My tip is to {b}. You will get better every week.
        People enjoy {x} because they can see how they get better. All you need is {a}.""",
    ),
    "school": _topic(
        """math|do five small problems a day|numbers
        history|draw a line of time with the main events|old letters and wars
        spelling|write each hard word three times|letters
        biology|make a drawing and name the parts|plants and animals
        geography|look at a map every evening|rivers and mountains
        French|say ten new words aloud|new sounds
        physics|try a small experiment at home|light and heat
        chemistry|learn the names on small cards|salts and metals
        poetry|read the lines aloud|rhymes
        a big exam|plan a little work for every day|many pages""",
        """How can I get better at {x}?
        I have trouble with {x}. Can you help?
        What is a good way to learn for {x}?
        My son does not like {x}. What can we do?
        I have to study {x} tonight. Where do I begin?""",
        """A good way is to {a}. Do a little every day and take breaks.
        Try to {a}. Short and regular work helps more than one long night.
        Start small. First {a}, and then explain it to a friend.
        Many people find it hard at first. It helps to {a}.
        {X} is about {b}, and that takes time. My advice is to {a}.""",
    ),
    "travel": _topic(
        """Paris|the river and the small cafes|May
        Rome|the old stones and good ice cream|April
        London|the museums and parks|June
        the mountains|clear air and long walks|September
        a lake|swimming and quiet evenings|July
        Tokyo|bright streets and fine noodles|November
        an island|warm sand and fresh fish|August
        the desert|wide skies and many stars|March
        Berlin|art, music and green parks|summer
        a small village|friendly people and good bread|autumn
        New York|tall houses and big shows|October
        Lisbon|steep streets and sweet cakes|spring""",
        """What can I see on a trip to {x}?
        When should I go to {x}?
        I am planning a trip to {x}. Any advice?
        Is {x} a good place for a holiday?
        What should I pack for {x}?
        Tell me about {x}.""",
        """Many people go to {x} for {a}. The best time is {b}.
        I would go in {b}. You can enjoy {a}.
        {X} is a fine choice. You will find {a} there.
        Pack light, take good shoes and leave some time for {a}.
        {X} is known for {a}. Go in {b} if you can.""",
    ),
    "advice": _topic(
        """sleep badly|turn off your screens an hour before bed
        feel nervous before a talk|breathe slowly and practice the first sentence
        often come late|leave the house ten minutes earlier
        forget names|say the name once when you hear it
        spend too much money|write down what you buy for a week
        get angry fast|count to ten before you speak
        feel lonely|call an old friend today
        work too long|set a clear end for your day
        eat too much sugar|keep a bowl of fruit on the table
        lose my keys all the time|hang them on the same hook every day
        feel tired in the afternoon|take a short walk outside
        put things off|start with five minutes of the hardest task""",
        """I {x}. What should I do?
        What helps if I {x}?
        Lately I {x}. Do you have any advice?
        Help, I {x}!""",
        """I am sorry to hear that. It may help to {a}.
        Many people know this problem. Try to {a}, and see how it feels after a week.
        Here is a simple idea: {a}. Small steps are enough.
        That is not easy. You could {a}, and talk to a friend about it.
        First, be kind to yourself. Then {a}.""",
    ),
    "stories": _topic(
        """a brave mouse|a cold forest|a small red lamp|found the way home
        an old sailor|a quiet harbor|a map with a hole in it|sailed out one last time
        a little robot|an empty school|a box of chalk|learned to draw the sun
        a shy dragon|a high mountain|a broken kettle|made tea for the whole village
        two sisters|a house by the sea|a locked door|opened it together
        a lost kitten|a busy market|a blue ribbon|was taken home by a kind girl
        a young baker|a sleepy town|a loaf that never got old|shared it with everyone
        a lonely king|a huge castle|a tiny bell|rang it until friends came
        a curious owl|a dark barn|a shiny coin|gave it to the farmer
        a gentle giant|a green valley|a tiny boat|carried it safely to the river""",
        """Tell me a short story about {x}.
        Can you write a story about {x} in {a}?
        I would like a bedtime story about {x}.
        Make up a little tale about {x} and {b}.
        Write three sentences about {x}.""",
        """Once upon a time {x} lived in {a}. One day there was {b} on the ground. \
        In the end {the_x} {c}, and all was well.
        This is the story of {x} in {a}. When {b} turned up, nobody knew what to do. But {the_x} {c}.
        In {a} lived {x}. Every night {the_x} dreamed of {b}. One morning {the_x} {c}.
        Long ago, in {a}, {x} found {b}. It was the start of a great adventure. At last {the_x} {c}.""",
    ),
    "facts": _topic(
        """the sky looks blue|the air scatters blue light more than red light
        leaves turn red|the green color fades in autumn and other colors show
        ice floats|ice is lighter than water
        we need sleep|the body and the mind rest and repair themselves
        bread rises|yeast makes small bubbles of gas in the dough
        the moon changes its shape|we see a different part of its bright side each night
        iron rusts|it meets water and air
        bees make honey|they need food for the winter
        birds fly south|there is more food in warm places in winter
        salt melts ice|salty water freezes only when it is colder
        cats purr|they are often calm and happy
        we have seasons|the earth is tilted while it goes around the sun""",
        """Why is it that {x}?
        Can you explain why {x}?
        My child asked me why {x}. What should I say?
        Tell me in one sentence why {x}.""",
        """It is because {a}.
        The short answer is that {a}.
        {A}. That is the main reason.
        Good question! This happens because {a}.
        You can say it like this: {a}.""",
    ),
    "jobs": _topic(
        """teacher|helps children learn|patience
        nurse|takes care of sick people|a kind heart
        baker|makes bread early in the morning|strong hands
        farmer|grows food and keeps animals|hard work
        pilot|flies planes around the world|calm nerves
        doctor|finds out why people are ill|many years of study
        carpenter|builds things out of wood|a good eye
        painter|makes rooms and pictures bright|a steady hand
        driver|brings people and goods to the right place|care
        writer|tells stories that stay with us|a clear head
        firefighter|puts out fires and saves people|courage
        engineer|plans bridges and machines|exact thinking""",
        """What does a {x} do?
        I want to become a {x}. What do I need?
        Is being a {x} a good job?
        Tell me about the work of a {x}.
        What is hard about being a {x}?""",
        """A {x} {a}. The job takes {b}.
        To become a {x} you need {b}. It is good work, because a {x} {a}.
        A {x} {a}. It is not always easy, but many people love it.
        The work of a {x} takes {b}. On most days a {x} {a}.
        It is a fine job if you have {b}. A {x} {a}.""",
    ),
    "roleplay": _topic(
        """a pirate captain|Ahoy, sailor|the wind is strong and the sea is wide
        a wise wizard|Welcome, young friend|the old books hold many secrets
        a friendly waiter|Good evening|today we have soup and fresh fish
        a space traveler|Greetings from far away|the stars look different from up here
        a knight|Well met|my sword is ready and my horse is fast
        a detective|Good day|I see mud on your shoes and a ticket in your hand
        a museum guide|Welcome, everyone|this vase is older than the whole town
        a talking tree|Hello, little one|I have stood here for two hundred years
        a train conductor|All aboard|the next stop is the city by the lake
        a queen|Rise, my friend|the kingdom needs your help""",
        """Pretend you are {x} and say hello to me.
        Imagine you are {x}. What do you say?
        You are {x}. Greet your guest.
        Speak like {x} for a moment.
        Play {x} and tell me about your day.""",
        """{A}! I am {x}, and {b}.
        {A}! Come closer and listen, for {b}.
        {A}! What a fine day it is. As you can see, {b}.
        {A}! You have found {x}. I tell you, {b}. What brings you here?""",
    ),
    "lists": _topic(
        """things to do on a rainy day|read a book|bake a cake|play a board game
        fruits that are red|apples|cherries|strawberries
        things in a school bag|a pencil case|a notebook|a water bottle
        animals that live on a farm|cows|sheep|hens
        ways to save money|cook at home|walk short ways|buy used things
        healthy snacks|nuts|carrots|plain yogurt
        warm colors|red|orange|yellow
        things to take on a picnic|a blanket|sandwiches|cold juice
        rooms in a house|the kitchen|the bedroom|the bathroom
        tools for a workshop|a hammer|a saw|a screwdriver
        ways to relax|take a warm bath|listen to the rain|go for a walk
        breakfast ideas|toast with jam|oatmeal|a boiled egg
        games for two players|chess|checkers|table tennis""",
        """List three {x}.
        Can you name three {x}?
        Give me a short list of {x}.
        What are some {x}?
        I need three {x}, please.""",
        """Here are three {x}:\\n1. {A}\\n2. {B}\\n3. {C}
        Three {x} are {a}, {b} and {c}.
        Sure! You could think of {a}, {b} or {c}.
        1. {A}\\n2. {B}\\n3. {C}""",
    ),
    "choices": _topic(
        """tea|coffee|it is gentle and keeps you calm
        the train|the car|you can read and look out of the window
        a book|a film|you can make your own pictures in your mind
        the city|the country|there is always something to see
        summer|winter|the days are long and warm
        a bike|a bus|you get fresh air and save money
        early mornings|late nights|the world is quiet and the mind is fresh
        pencils|pens|you can rub out a mistake
        apples|pears|they stay fresh for a long time
        stairs|elevators|it is good for your heart""",
        """What is better, {x} or {a}?
        Should I choose {x} or {a}?
        Do you prefer {x} or {a}?
        {X} or {a}: what do you think?""",
        """I would choose {x}, because {b}.
        Both are fine. With {x}, {b}.
        It depends on what you like. A good point for {x} is that {b}.
        My pick is {x}. The reason is simple: {b}.""",
    ),
    "feelings": _topic(
        """happy|that is wonderful|share it with somebody you like
        sad|I am sorry to hear that|talk to a friend or take a slow walk
        bored|that happens to all of us|try something that you have never done
        excited|how nice|enjoy every minute of it
        worried|I understand|write down what you can change and what you cannot
        tired|that sounds like a long day|rest a little and drink some water
        proud|well done|remember how hard you worked for it
        angry|I can see why|take three deep breaths first
        lazy|a slow day is fine|do one small thing and then rest""",
        """I feel {x} today.
        I am so {x} right now.
        Why do I feel {x} so often?
        What can I do when I am {x}?
        My friend is {x}. What should I say?""",
        """{A}. You could {b}.
        {A}! It is good to notice how you feel. My idea is to {b}.
        When people are {x}, it often helps to {b}.
        It is all right to feel {x}. If you like, {b}.""",
    ),
    "words": _topic(
        """a harbor|a safe place where ships can stay|The boat reached the harbor at night.
        a recipe|a plan that tells you how to cook something|I found a recipe for apple pie.
        a habit|something you do often without thinking|Reading at night is a good habit.
        a budget|a plan for how to use your money|Our budget for the trip is small.
        an orbit|the path of one body around another|The moon is in orbit around the earth.
        a promise|words that say you will surely do something|She kept her promise.
        a rumor|news that may not be true|I heard a rumor about a new school.
        a hero|a person who is brave and helps others|The nurse was our hero.
        a bargain|something good for a low price|This coat was a bargain.
        a puzzle|a game or question that makes you think|He solved the puzzle in an hour.""",
        """What is {x}?
        What do people mean by {x}?
        Explain {x} in simple words.
        Tell me what {x} is.
        How would you explain {x} to a child?""",
        """{X} is {a}.
        In simple words, {x} is {a}. For example: {b}
        {X} is {a}. Here is a sentence: {b}
        {b} So {x} is {a}.""",
    ),
}

HELD_OUT: dict[str, Topic] = {
    "music": _topic(
        "the piano\nthe guitar\nthe violin\nthe drums\nthe flute",
        """I want to learn {x}. How do I begin?
                    Is {x} hard to play?
                    What do people love about {x}?""",
    ),
    "garden": _topic(
        "tomatoes\nroses\nherbs\napple trees\nstrawberries",
        """How do I grow {x} at home?
                     My {x} look sick. What should I do?
                     When should I plant {x}?""",
    ),
    "parties": _topic(
        "a birthday\na wedding\na farewell party\na family dinner",
        """Give me an idea for {x}.
                      What should I bring to {x}?
                      I am planning {x} next month. Any advice?""",
    ),
    "space": _topic(
        "a comet\nthe planet Mars\na black hole\na satellite",
        """Tell me about {x}.
                    Write a short story about {x}.
                    What would it be like to see {x} up close?""",
    ),
    "sports": _topic(
        "tennis\nswimming\nbasketball\ncycling",
        """What do I need for {x}?
                     List three good things about {x}.
                     My daughter wants to try {x}. What do you think?""",
    ),
    "home": _topic(
        "a leaking tap\na messy desk\nnoisy neighbors\na broken lamp\na cold bedroom",
        """How do I deal with {x}?
                   I have {x} at home. What should I do first?""",
    ),
    "films": _topic(
        "a comedy\na science fiction film\nan old western\na cartoon",
        """Should I watch {x} tonight?
                    Pretend you are the hero of {x} and introduce yourself.
                    What makes {x} good?""",
    ),
}
