package app

import (
	"fmt"
	"unicode/utf8"

	"github.com/goccy/go-yaml/token"
)

// Limits of a file. They are far above any real deployment (4,096 attached ranks need about 400 KiB and
// 100,000 tokens). They limit the cost of a hostile file to some tens of milliseconds and megabytes.
const (
	// MaxFileBytes is the largest file Parse reads.
	MaxFileBytes = 1 << 20
	// MaxDepth bounds how deep maps and lists nest.
	MaxDepth = 64
	// MaxExpansion bounds the values that aliases and merge keys may add to a file.
	MaxExpansion = 20_000

	maxTokens    = 250_000
	maxKeys      = 1_000    // of one block map: the parser recurses once per key and copies its result so far
	maxRare      = 1_000    // anchors, tags, "? key" forms, empty values: each costs the parser time or stack
	maxPathBytes = 32 << 20 // the parser stores the path of every key as a string
)

// levelKind is the kind of a level of nesting.
type levelKind uint8

const (
	blockMap levelKind = iota
	blockList
	flowMap
	flowList
)

// level is one open map or list.
type level struct {
	kind  levelKind
	col   int
	size  int  // bytes it adds to a path
	keys  int  // block map: how many so far
	words bool // flow map: the entry has tokens
	colon bool // flow map: the entry has its ":"
}

// guard checks the tokens before the parser runs, because the parser recurses without a bound and needs
// quadratic time for empty values. It is a stack machine over columns: exact enough to count, but not a
// grammar.
type guard struct {
	open  []level // maps and lists around the token
	width int     // bytes of the path of open
	paths int     // bytes of all paths so far
	rare  int
}

// checkText refuses text that is too long, is not UTF-8, or has control characters. at is the position.
func checkText(text []byte) (what string, at place) {
	at = place{line: 1, col: 1}
	if len(text) > MaxFileBytes {
		return fmt.Sprintf("the file has %d bytes, the limit is %d", len(text), MaxFileBytes), at
	}
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRune(text[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			return "the file is not UTF-8 text", at
		case r < ' ' && r != '\t' && r != '\n' && r != '\r':
			return fmt.Sprintf("control character %U in the file", r), at
		case r == '\n':
			at = place{line: at.line + 1}
		}
		at.col++
		i += n
	}
	return "", place{}
}

// checkTokens returns why the parser must not get the tokens, and where; "" if it may.
func checkTokens(tokens token.Tokens) (what string, at place) {
	var g guard
	for i, t := range tokens {
		var next *token.Token
		if i+1 < len(tokens) {
			next = tokens[i+1]
		}
		g.step(t, next)
		if what := g.checkLimits(i); what != "" {
			return what, place{line: t.Position.Line, col: t.Position.Column}
		}
	}
	return "", place{}
}

func (g *guard) checkLimits(i int) string {
	switch {
	case len(g.open) > MaxDepth:
		return fmt.Sprintf("maps and lists nest deeper than %d levels", MaxDepth)
	case g.rare > maxRare:
		return fmt.Sprintf("more than %d anchors, tags, complex keys and empty values", maxRare)
	case g.top().keys > maxKeys:
		return fmt.Sprintf("more than %d keys in a map", maxKeys)
	case i >= maxTokens, g.paths > maxPathBytes:
		return "the file has too many values"
	default:
		return ""
	}
}

func (g *guard) step(t, next *token.Token) {
	top := g.top()
	switch t.Type {
	case token.MappingStartType:
		g.word()
		g.push(level{kind: flowMap, size: 1})
	case token.SequenceStartType:
		g.word()
		g.push(level{kind: flowList, size: len("[0]")})
	case token.MappingEndType, token.SequenceEndType:
		g.endEntry()
		if g.inFlow() {
			g.pop()
		}
	case token.CollectEntryType:
		g.endEntry()
	case token.AnchorType, token.TagType, token.MappingKeyType:
		g.rare++
	case token.SequenceEntryType:
		g.dash(t, next)
	case token.MappingValueType:
		top.colon = true
		g.colon(t, next)
	default:
		g.word()
		if next != nil && next.Type == token.MappingValueType {
			g.key(t)
		}
	}
}

// top returns the innermost level, or a new one if no level is open.
func (g *guard) top() *level {
	if len(g.open) == 0 {
		return &level{}
	}
	return &g.open[len(g.open)-1]
}

func (g *guard) inFlow() bool { return g.top().kind >= flowMap }

func (g *guard) word() { g.top().words = true }

func (g *guard) push(l level) {
	g.open = append(g.open, l)
	g.width += l.size
	g.paths += g.width
}

func (g *guard) pop() {
	g.width -= g.top().size
	g.open = g.open[:len(g.open)-1]
}

// endEntry counts an entry of a flow map without ":", for which the parser adds a value.
func (g *guard) endEntry() {
	top := g.top()
	if top.kind == flowMap && top.words && !top.colon {
		g.rare++
	}
	top.words, top.colon = false, false
}

// key opens the entry t of a map. In block style it closes the levels further right.
func (g *guard) key(t *token.Token) {
	if g.inFlow() {
		g.paths += g.width + len(t.Value)
		return
	}
	keys := 1
	for len(g.open) > 0 && g.top().col >= t.Position.Column {
		if top := g.top(); top.kind == blockMap && top.col == t.Position.Column {
			keys = top.keys + 1
		}
		g.pop()
	}
	g.push(level{kind: blockMap, col: t.Position.Column, size: len(t.Value) + 1, keys: keys})
}

// dash opens an entry of a block list. A list may be in the same column as the key above it.
func (g *guard) dash(t, next *token.Token) {
	if g.inFlow() {
		return
	}
	col := t.Position.Column
	for len(g.open) > 0 && (g.top().col > col || g.top().col == col && g.top().kind == blockList) {
		g.pop()
	}
	g.push(level{kind: blockList, col: col, size: len("[0]")})
	if next == nil || next.Position.Line > t.Position.Line && next.Position.Column <= col {
		g.rare++
	}
}

// colon counts a key without a value.
func (g *guard) colon(t, next *token.Token) {
	if next == nil {
		g.rare++
		return
	}
	col := g.top().col
	below := next.Position.Line > t.Position.Line && next.Position.Column <= col
	switch next.Type {
	case token.CollectEntryType, token.MappingEndType, token.SequenceEndType:
		g.rare++
	case token.SequenceEntryType:
		below = below && next.Position.Column < col
		fallthrough
	default:
		if below && !g.inFlow() {
			g.rare++
		}
	}
}
