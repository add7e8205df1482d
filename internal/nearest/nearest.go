// Package nearest finds the word that was probably meant.
package nearest

import (
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Word is the word of words that was probably meant by found, or "". Case and the choice of _ or - do not
// count as a difference; otherwise about one edit in three characters is forgiven.
func Word(found string, words []string) string { return Within(max(1, len(found)/3), found, words) }

// Within is Word with another number of edits that are forgiven.
func Within(edits int, found string, words []string) string {
	if len(found) > maxWord {
		return ""
	}
	best, bound := "", edits+1
	for _, w := range words {
		if d := distance(plain(found), plain(w)); d < bound {
			best, bound = w, d
		}
	}
	return best
}

// CheckFlag refuses a value of a flag that is none of its words.
func CheckFlag(flag, value string, words ...string) error {
	if slices.Contains(words, value) {
		return nil
	}
	err := problem.New(problem.InvalidArgument, "%s %q: wanted %s", flag, value, strings.Join(words, ", "))
	if near := Word(value, words); near != "" {
		return err.WithHint("did you mean %s?", near)
	}
	return err.WithHint("leave %s out for its default", flag)
}

func plain(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "-") }

// maxWord bounds the words that are compared; longer ones are never taken for a typing error.
const maxWord = 64

// distance is the number of edits (insert, delete, replace, swap of neighbours) between a and b, in bytes.
func distance(a, b string) int {
	if len(b) > maxWord {
		return maxWord
	}
	var rows [3][maxWord + 1]int
	for j := range len(b) + 1 {
		rows[0][j] = j
	}
	for i := range len(a) {
		before, above, row := &rows[(i+2)%3], &rows[i%3], &rows[(i+1)%3]
		row[0] = i + 1
		for j := range len(b) {
			row[j+1] = min(above[j]+1, row[j]+1, above[j+1]+1)
			if a[i] == b[j] {
				row[j+1] = min(row[j+1], above[j])
			}
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return rows[len(a)%3][len(b)]
}
