package app

import (
	"math"
	"regexp"
	"strconv"
	"strings"
)

// shape is the type of a node of the file, by the core schema of YAML 1.2.
type shape uint8

const (
	nullShape shape = iota
	textShape
	intShape
	floatShape
	boolShape
	listShape
	mapShape
	refusedShape // has a fault already
)

// String returns the shape in words for people.
func (s shape) String() string {
	return [...]string{
		"nothing", "text", "an integer", "a number", "a boolean", "a list", "a map",
		"something else",
	}[s]
}

// place is a position in the file. Lines and columns count from 1, columns in characters.
type place struct{ line, col int }

// node is one value of the file. Aliases share nodes, so the tree is a directed graph without cycles. size
// counts the nodes of a walk.
type node struct {
	place
	shape   shape
	text    string // of a scalar: its source text without quotes
	quoted  bool
	items   []*node // of a list
	entries []entry // of a map, in file order, merge keys resolved
	size    int
	depth   int // levels of maps and lists, 0 for a scalar
}

// entry is one key of a map.
type entry struct {
	place
	key   string
	value *node
}

// get returns the value of key, nil if the map has no such key.
func (n *node) get(key string) *node {
	for i := range n.entries {
		if n.entries[i].key == key {
			return n.entries[i].value
		}
	}
	return nil
}

// isScalar reports whether n is a single value.
func (n *node) isScalar() bool { return n.shape < listShape }

// describe returns how a fault names the value of n.
func (n *node) describe() string {
	const longest = 60
	switch {
	case !n.isScalar(), n.shape == nullShape:
		return n.shape.String()
	case len(n.text) > longest:
		return strconv.Quote(strings.ToValidUTF8(n.text[:longest], "") + "…")
	case n.shape == textShape:
		return strconv.Quote(n.text)
	default:
		return n.text
	}
}

var (
	wholeNumber = regexp.MustCompile(`^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$`)
	realNumber  = regexp.MustCompile(`^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$`)
	notFinite   = regexp.MustCompile(`^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$`)
)

// shapeOf returns the shape of an unquoted scalar. It does not use the parser's own types: the parser reads
// 010 as eight, 1_000 as a number and 1e3 as text, so a JSON file would mean something else than the same
// YAML.
func shapeOf(text string) shape {
	switch text {
	case "", "~", "null", "Null", "NULL":
		return nullShape
	case "true", "True", "TRUE", "false", "False", "FALSE":
		return boolShape
	}
	switch {
	case wholeNumber.MatchString(text):
		return intShape
	case realNumber.MatchString(text), notFinite.MatchString(text):
		return floatShape
	default:
		return textShape
	}
}

// whole returns the value of an integer node; false if it does not fit 64 bits.
func (n *node) whole() (int64, bool) {
	digits, base := n.text, 10
	switch {
	case strings.HasPrefix(digits, "0x"):
		digits, base = digits[2:], 16
	case strings.HasPrefix(digits, "0o"):
		digits, base = digits[2:], 8
	}
	v, err := strconv.ParseInt(digits, base, 64)
	return v, err == nil && n.shape == intShape
}

// real returns the value of a number node; false if it is not finite.
func (n *node) real() (float64, bool) {
	if v, ok := n.whole(); ok {
		return float64(v), true
	}
	if n.shape != floatShape || notFinite.MatchString(n.text) {
		return 0, false
	}
	v, err := strconv.ParseFloat(n.text, 64)
	return v, err == nil && !math.IsInf(v, 0)
}

// truth returns the value of a boolean node.
func (n *node) truth() bool { return strings.EqualFold(n.text, "true") }

// addSize adds the size and depth of a child.
func (n *node) addSize(child *node) {
	n.size += child.size
	n.depth = max(n.depth, child.depth+1)
}

func (n *node) add(e entry) {
	n.entries = append(n.entries, e)
	n.addSize(e.value)
}
