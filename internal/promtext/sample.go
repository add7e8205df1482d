package promtext

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// The types of metrics.
const (
	kindCounter   = "counter"
	kindGauge     = "gauge"
	kindHistogram = "histogram"
	kindSummary   = "summary"
	kindUntyped   = "untyped"
)

// knownKind is the type that a TYPE line names; untyped if the text format does not have it.
func knownKind(kind string) string {
	switch kind {
	case kindCounter, kindGauge, kindHistogram, kindSummary:
		return kind
	}
	return kindUntyped
}

// suffixesOf are the endings of the samples of a type whose names differ from the metric's.
func suffixesOf(kind string) []string {
	switch kind {
	case kindHistogram:
		return []string{"_sum", "_count", "_bucket"}
	case kindSummary:
		return []string{"_sum", "_count"}
	}
	return nil
}

// sample is one line of a page. Timestamps and exemplars are dropped.
type sample struct {
	name   string
	labels []label
	value  string
}

// label is a label of a sample. The value keeps its escapes.
type label struct{ name, value string }

// fits reports whether a sample may stand in a family of that type. suffix is what its name has behind that
// of the family.
func (s *sample) fits(kind, suffix string) bool {
	key, isNeeded := "", false
	switch kind {
	case kindHistogram:
		key, isNeeded = "le", suffix == "_bucket"
		if suffix == "" {
			return false
		}
	case kindSummary:
		key, isNeeded = "quantile", suffix == ""
	default:
		return true
	}
	for _, l := range s.labels {
		if l.name == key {
			return isNumber(l.value)
		}
	}
	return !isNeeded
}

// parseSample splits a line into its parts. ok is false if the line is malformed.
func parseSample(line string) (s sample, ok bool) {
	end := strings.IndexAny(line, "{ \t")
	if end < 0 {
		return s, false
	}
	s.name = line[:end]
	rest := strings.TrimLeft(line[end:], " \t")
	if !isName(s.name, true) {
		return s, false
	}
	if strings.HasPrefix(rest, "{") {
		if s.labels, rest, ok = parseLabels(rest[1:]); !ok {
			return s, false
		}
	}
	rest, _, _ = strings.Cut(rest, "#") // an exemplar
	s.value, rest = cutWord(rest)
	timestamp, rest := cutWord(rest)
	return s, isNumber(s.value) && (timestamp == "" || isNumber(timestamp)) && rest == ""
}

// parseLabels splits name="value",… up to the closing brace from what is behind it.
func parseLabels(text string) (labels []label, rest string, ok bool) {
	seen := map[string]bool{}
	for {
		text = strings.TrimLeft(text, " \t")
		if rest, ok = strings.CutPrefix(text, "}"); ok {
			return labels, rest, true
		}
		name, behind, _ := strings.Cut(text, "=")
		name, behind = strings.TrimRight(name, " \t"), strings.TrimLeft(behind, " \t")
		value, behind, ok := cutQuoted(behind)
		if !ok || !isName(name, false) || name == "__name__" || seen[name] {
			return nil, "", false
		}
		seen[name] = true
		labels = append(labels, label{name, value})
		behind = strings.TrimLeft(behind, " \t")
		text, ok = strings.CutPrefix(behind, ",")
		if !ok && !strings.HasPrefix(behind, "}") {
			return nil, "", false
		}
	}
}

// cutQuoted splits a value in quotes from what is behind it. The value keeps its escapes.
func cutQuoted(text string) (value, rest string, ok bool) {
	if !strings.HasPrefix(text, `"`) {
		return "", "", false
	}
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			if i++; i == len(text) || !strings.ContainsRune(`\"n`, rune(text[i])) {
				return "", "", false
			}
		case '"':
			return text[1:i], text[i+1:], utf8.ValidString(text[1:i])
		}
	}
	return "", "", false
}

// cutWord splits the first word from what is behind it.
func cutWord(text string) (word, rest string) {
	text = strings.Trim(text, " \t")
	end := strings.IndexAny(text, " \t")
	if end < 0 {
		return text, ""
	}
	return text[:end], strings.TrimLeft(text[end:], " \t")
}

// isName reports whether a text is the name of a metric, or of a label, which has no colon.
func isName(text string, isMetric bool) bool {
	for i, c := range []byte(text) {
		switch {
		case c == '_', 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', c == ':' && isMetric,
			'0' <= c && c <= '9' && i > 0:
		default:
			return false
		}
	}
	return text != ""
}

// isNumber reports whether a text is a value. The text format knows no hexadecimal numbers.
func isNumber(text string) bool {
	if strings.ContainsAny(text, "xXpP_") {
		return false
	}
	_, err := strconv.ParseFloat(text, 64)
	return err == nil
}
