package app

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// builder converts the parser's tree into nodes. Aliases become shared nodes, merge keys become entries. YAML
// forms that no configuration needs become faults.
type builder struct {
	d        *decoder
	anchors  map[string]*node
	expanded int // nodes that aliases and merge keys added
}

// parseTokens calls the parser and turns its panics into errors. The text may be any bytes, so a case that
// the parser does not handle must not stop the server.
func parseTokens(tokens token.Tokens) (file *ast.File, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the YAML parser gave up: %v", r)
		}
	}()
	return parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
}

func placeOfToken(t *token.Token) place {
	if t == nil || t.Position == nil {
		return place{line: 1, col: 1}
	}
	return place{line: max(1, t.Position.Line), col: max(1, t.Position.Column)}
}

// placeOf returns where n begins. For a block map the parser reports the position of its first colon.
func placeOf(n ast.Node) place {
	if m, ok := n.(*ast.MappingNode); ok && !m.IsFlowStyle && len(m.Values) > 0 {
		return placeOf(m.Values[0].Key)
	}
	return placeOfToken(n.GetToken())
}

func (b *builder) refuse(n ast.Node, message, hint string) *node {
	at := placeOf(n)
	b.d.fault(at, "", Fault{Message: message, Hint: hint})
	return &node{place: at, shape: refusedShape, size: 1}
}

// node converts n and everything in it.
func (b *builder) node(n ast.Node) *node {
	switch v := n.(type) {
	case *ast.MappingNode:
		return b.mapping(v)
	case *ast.MappingValueNode:
		return b.mapping(ast.Mapping(v.Start, false, v))
	case *ast.SequenceNode:
		return b.list(v)
	case *ast.AnchorNode:
		out := b.node(v.Value)
		b.anchors[v.Name.GetToken().Value] = out
		return out
	case *ast.AliasNode:
		return b.alias(v)
	case *ast.TagNode:
		return b.tagged(v)
	case *ast.LiteralNode:
		return &node{place: placeOf(v), shape: textShape, text: v.Value.Value, quoted: true, size: 1}
	case ast.ScalarNode:
		return scalarNode(v)
	default:
		return b.refuse(n, "this form of YAML is not understood", "write plain maps, lists and scalars")
	}
}

func scalarNode(v ast.Node) *node {
	t := v.GetToken()
	out := &node{place: placeOf(v), text: t.Value, size: 1}
	out.quoted = t.Type == token.DoubleQuoteType || t.Type == token.SingleQuoteType
	if out.shape = textShape; !out.quoted {
		out.shape = shapeOf(out.text)
	}
	return out
}

func (b *builder) list(v *ast.SequenceNode) *node {
	out := &node{place: placeOf(v), shape: listShape, size: 1}
	for _, item := range v.Values {
		child := b.node(item)
		out.items = append(out.items, child)
		out.addSize(child)
	}
	return b.checkDepth(v, out)
}

// checkDepth refuses a node that aliases nest too deep. guard has checked only the written nesting.
func (b *builder) checkDepth(at ast.Node, n *node) *node {
	if n.depth > MaxDepth {
		return b.refuse(at, fmt.Sprintf("maps and lists nest deeper than %d levels", MaxDepth),
			"write a flatter file")
	}
	return n
}

// alias returns the anchored node itself. It counts the nodes that a walk visits again.
func (b *builder) alias(v *ast.AliasNode) *node {
	name := v.Value.GetToken().Value
	target, ok := b.anchors[name]
	if !ok {
		return b.refuse(v, "unknown alias "+strconv.Quote("*"+name),
			"define &"+name+" above this line, and outside of itself")
	}
	return b.expand(v, target)
}

func (b *builder) expand(at ast.Node, target *node) *node {
	if b.expanded > MaxExpansion {
		return &node{place: placeOf(at), shape: refusedShape, size: 1}
	}
	if b.expanded += target.size; b.expanded > MaxExpansion {
		return b.refuse(at, fmt.Sprintf("aliases and merge keys add more than %d values", MaxExpansion),
			"write fewer or smaller aliases")
	}
	return target
}

// tagged handles the core tags. Any other tag is a fault.
func (b *builder) tagged(v *ast.TagNode) *node {
	if v.Value == nil {
		return b.refuse(v, "a tag without a value", "leave the tag out")
	}
	out := b.node(v.Value)
	switch v.Start.Value {
	case "!!str":
		if out.isScalar() {
			text := *out
			text.shape, text.quoted = textShape, true
			return &text
		}
	case "!!int", "!!float", "!!bool", "!!null", "!!map", "!!seq":
	default:
		return b.refuse(v, "unknown tag "+strconv.Quote(v.Start.Value), "leave the tag out")
	}
	return out
}

// mapping converts a map. Written keys override merged ones, and earlier merged maps override later ones.
func (b *builder) mapping(v *ast.MappingNode) *node {
	out := &node{place: placeOf(v), shape: mapShape, size: 1}
	lines := map[string]int{}
	var merged []*node
	for _, e := range v.Values {
		if e.Key.IsMergeKey() && e.Key.Type() == ast.MergeKeyType {
			merged = append(merged, b.merges(e.Value)...)
			continue
		}
		key, ok := b.key(e.Key)
		value := b.node(e.Value)
		if !ok {
			continue
		}
		if line, twice := lines[key]; twice {
			b.refuse(e.Key, "duplicate key "+strconv.Quote(key),
				fmt.Sprintf("it is also on line %d; keep one", line))
			continue
		}
		at := placeOf(e.Key)
		lines[key] = at.line
		out.add(entry{at, key, value})
	}
	for _, m := range merged {
		for _, e := range m.entries {
			if _, taken := lines[e.key]; !taken {
				lines[e.key] = e.line
				out.add(e)
			}
		}
	}
	return b.checkDepth(v, out)
}

func (b *builder) key(k ast.Node) (string, bool) {
	if complexKey, ok := k.(*ast.MappingKeyNode); ok {
		k = complexKey.Value
	}
	switch k.(type) {
	case *ast.LiteralNode, *ast.AliasNode, *ast.AnchorNode, *ast.TagNode, *ast.MappingNode, *ast.SequenceNode:
	case ast.ScalarNode:
		return k.GetToken().Value, true
	}
	b.refuse(k, "a key that is not plain text", "write keys as plain or quoted text")
	return "", false
}

// merges returns the maps of a merge key: one map or a list of maps.
func (b *builder) merges(v ast.Node) []*node {
	list := []ast.Node{v}
	if seq, ok := v.(*ast.SequenceNode); ok {
		list = seq.Values
	}
	var out []*node
	for _, item := range list {
		m := b.node(item)
		if m.shape == refusedShape {
			continue
		}
		if m.shape != mapShape {
			b.refuse(item, "a merge key (<<) takes a map or a list of maps", "name the anchor of a map")
			continue
		}
		out = append(out, m)
	}
	return out
}

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

// place is a position in the file. Lines and columns count from 1, columns in characters. file is the name of
// a model file that the file refers to, "" for the file itself.
type place struct {
	line, col int
	file      string
}

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

func (n *node) isScalar() bool { return n.shape < listShape }

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

func (n *node) truth() bool { return strings.EqualFold(n.text, "true") }

func (n *node) addSize(child *node) {
	n.size += child.size
	n.depth = max(n.depth, child.depth+1)
}

func (n *node) add(e entry) {
	n.entries = append(n.entries, e)
	n.addSize(e.value)
}
