"""The words of a user: levels, properties and their files, and the plan that follows from them."""
