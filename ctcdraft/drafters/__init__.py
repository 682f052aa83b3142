"""Whatever guesses: one file, one YAML. Drafters know trees and states; they never compute a loss."""
