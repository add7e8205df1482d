package app

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/goccy/go-yaml/lexer"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestHostileFiles: files that overload a parser are refused before they reach it, each with a fault and
// little memory.
// No other test runs beside it, because it measures memory.
func TestHostileFiles(t *testing.T) {
	var bomb strings.Builder
	bomb.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n")
	for i := 1; i < 12; i++ {
		fmt.Fprintf(&bomb, "a%d: &a%d [%s]\n", i, i,
			strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i-1), 10), ","))
	}
	var nest strings.Builder
	nest.WriteString("a0: &a0 [[[[[[[[[[x]]]]]]]]]]\n")
	for i := 1; i < 12; i++ {
		fmt.Fprintf(&nest, "a%d: &a%d [[[[[[[[[[*a%d]]]]]]]]]]\n", i, i, i-1)
	}
	staircase := ""
	for i := range 200 {
		staircase += strings.Repeat(" ", i) + "a:\n"
	}
	for name, c := range map[string]struct{ text, want string }{
		"too long":    {strings.Repeat("#", MaxFileBytes+1), "the limit is 1048576"},
		"alias bomb":  {bomb.String(), "aliases and merge keys add more than 20000 values"},
		"alias depth": {nest.String(), "nest deeper than 64"},
		"flow depth":  {strings.Repeat("[", 100_000), "nest deeper than 64"},
		"map depth":   {strings.Repeat("{a: ", 100_000), "nest deeper than 64"},
		"dashes":      {strings.Repeat("- ", 100_000), "nest deeper than 64"},
		"staircase":   {staircase, "nest deeper than 64"},
		"tags":        {strings.Repeat("!!str ", 100_000), "anchors, tags, complex keys and empty values"},
		"anchors":     {strings.Repeat("&a ", 100_000) + "x", "anchors, tags, complex keys and empty values"},
		"questions":   {strings.Repeat("? a\n", 100_000), "anchors, tags, complex keys and empty values"},
		"empty items": {strings.Repeat("-\n", 100_000), "anchors, tags, complex keys and empty values"},
		"empty keys":  {strings.Repeat("- a:\n", 100_000), "anchors, tags, complex keys and empty values"},
		"empty flow": {
			"[" + strings.Repeat("a: ,", 100_000),
			"anchors, tags, complex keys and empty values",
		},
		"bare flow":   {"{" + strings.Repeat("a,", 100_000), "anchors, tags, complex keys and empty values"},
		"many keys":   {strings.Repeat("a: 1\n", 100_000), "more than 1000 keys in a map"},
		"many values": {"[" + strings.Repeat("a,", 400_000), "too many values"},
		"long paths": {
			"{" + strings.Repeat("a", 300_000) + ": {" + strings.Repeat("b: 1,", 100_000),
			"too many values",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			lines := faultsOf(t, c.text)
			runtime.ReadMemStats(&after)
			require.NotEmpty(t, lines)
			assert.Contains(t, strings.Join(lines, "\n"), c.want)
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(600<<20))
		})
	}
}

// TestGuardLetsRealFilesPass: the largest attach application is far from every limit.
func TestGuardLetsRealFilesPass(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString("applications:\n  - name: big\n    model:\n      id: big\n    engine:\n      kind: " +
		"attach\n      ranks:\n")
	for i := range MaxDPSize {
		fmt.Fprintf(&b,
			"        - url: \"http://10.0.%d.%d:8000\"\n          kv_events:\n            connect: "+
				"\"tcp://10.0.%d.%d:5557\"\n", i/256, i%256, i/256, i%256)
	}
	what, _ := checkTokens(lexer.Tokenize(b.String()))
	require.Empty(t, what)
	assert.Equal(t, MaxDPSize, parsed(t, b.String()).Applications[0].NumReplicas)
}

func TestGuardCountsNesting(t *testing.T) {
	t.Parallel()
	for text, depth := range map[string]int{
		"a: 1\nb: 2\n":                 1,
		"a:\n- b: 1\n- c: 2\nd: 3\n":   3,
		"a:\n  - b: 1\n    c: 2\n":     3,
		"a: {b: [1, {c: 2}]}\n":        4,
		"- - - x\n":                    3,
		"a:\n  b:\n    c: 1\n  d: 2\n": 3,
	} {
		var g guard
		deepest := 0
		tokens := lexer.Tokenize(text)
		for i, tk := range tokens {
			if i+1 < len(tokens) {
				g.step(tk, tokens[i+1])
			} else {
				g.step(tk, nil)
			}
			deepest = max(deepest, len(g.open))
		}
		assert.Equal(t, depth, deepest, text)
		assert.Zero(t, g.rare, text)
	}
}
