package routing

// nearest is the word of exist with the smallest edit distance to found, "" if none is close enough to be a slip:
// at most a third of the longer word, and at least two edits are always forgiven.
func nearest(found string, exist []string) string {
	best, least := "", -1
	for _, w := range exist {
		d := distance(found, w)
		if d > max(2, max(len(found), len(w))/3) {
			continue
		}
		if least < 0 || d < least {
			best, least = w, d
		}
	}
	return best
}

// distance is Levenshtein's, in bytes; "_" and "-" count as equal, the commonest slip of all.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			step := diag
			if !same(a[i], b[j]) {
				step++
			}
			diag = row[j+1]
			row[j+1] = min(step, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

func same(x, y byte) bool {
	if x == '_' {
		x = '-'
	}
	if y == '_' {
		y = '-'
	}
	return x == y
}
