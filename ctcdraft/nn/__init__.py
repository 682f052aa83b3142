"""The layers drafters are made of. They know shapes; not what is drafted, trained or decoded with them."""
