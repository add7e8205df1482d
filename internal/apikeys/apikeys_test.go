package apikeys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const example = `# who may ask
ann   sk-ann-0001
bob   sk-bob-0001   models=small,org/large
bob   sk-bob-0002

`

func hashed(key string) string {
	sum := sha256.Sum256([]byte(key))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// SP2: a key is found in each field that clients use, and a wrong one in none; a file may hold digests alone.
func TestKeysAreFound(t *testing.T) {
	s, err := Parse([]byte(example + "eve " + hashed("sk-eve-0001") + " models=small\r\n"))
	require.NoError(t, err)
	assert.Equal(t, []string{"ann", "bob", "eve"}, s.Names())
	for name, c := range map[string]struct {
		fields    []string // name, value
		want      string
		presented bool
	}{
		"openai":    {[]string{"Authorization", "Bearer sk-ann-0001"}, "ann", true},
		"any case":  {[]string{"authorization", "bearer  sk-bob-0002 "}, "bob", true},
		"anthropic": {[]string{"x-api-key", "sk-eve-0001"}, "eve", true},
		"azure":     {[]string{"api-key", "sk-bob-0001"}, "bob", true},
		"one of two": {
			[]string{"Authorization", "Bearer nope", "x-api-key", "sk-ann-0001"}, "ann", true,
		},
		"none":               {nil, "", false},
		"wrong":              {[]string{"Authorization", "Bearer sk-ann-0002"}, "", true},
		"another scheme":     {[]string{"Authorization", "Basic sk-ann-0001"}, "", true},
		"no scheme":          {[]string{"Authorization", "sk-ann-0001"}, "", true},
		"an empty one":       {[]string{"x-api-key", ""}, "", true},
		"the digest":         {[]string{"x-api-key", hashed("sk-eve-0001")}, "", true},
		"a part":             {[]string{"x-api-key", "sk-ann-000"}, "", true},
		"longer than a line": {[]string{"x-api-key", strings.Repeat("k", MaxKey+1)}, "", true},
	} {
		h := http.Header{}
		for i := 0; i < len(c.fields); i += 2 {
			h.Add(c.fields[i], c.fields[i+1])
		}
		k, presented := s.FindIn(h)
		got := ""
		if k != nil {
			got = k.Name
		}
		assert.Equal(t, c.want, got, name)
		assert.Equal(t, c.presented, presented, name)
		h.Set("Accept", "x")
		Remove(h)
		assert.Equal(t, http.Header{"Accept": {"x"}}, h, name)
	}
	bob := s.Find("sk-bob-0001")
	assert.True(t, bob.Allows("org/large"))
	assert.False(t, bob.Allows("other"))
	assert.False(t, bob.AllowsAll())
	assert.True(t, s.Find("sk-bob-0002").Allows("other"), "each key has its own models")
	var none *Key
	assert.True(t, none.Allows("other") && none.AllowsAll(), "a node without keys")
}

// SP2: a file with a fault is refused as a whole; the error names the line and never a key.
func TestFaultsOfAFile(t *testing.T) {
	for text, want := range map[string]string{
		"":                             "the file has no key",
		"# nothing\n\n":                "the file has no key",
		"ann":                          "line 1: it has 1 words, want 2 or 3",
		"\nann sk-secret-1 models=a b": "line 2: it has 4 words, want 2 or 3",
		"ann short":                    "line 1: a key has 8 to 512 printable ASCII characters",
		"ann sk-sécret-1":              "line 1: a key has 8 to 512 printable ASCII characters",
		"a/b sk-secret-1": "line 1: the name must have 1 to 64 letters, digits, dots, dashes and " +
			"underscores",
		"ann sk-secret-1 model=a":                       "line 1: after the key comes models=a,b or nothing",
		"ann sk-secret-1 models=a,,b":                   "line 1: after the key comes models=a,b or nothing",
		"ann sha256:secret":                             "line 1: after sha256: come 64 hex digits",
		"ann sk-secret-1\nbob sk-secret-1":              "lines 1 and 2 have the same key",
		"ann sk-secret-1\nbob " + hashed("sk-secret-1"): "lines 1 and 2 have the same key",
		strings.Repeat("#", MaxFile+1):                  "the file has more than 1048576 bytes",
	} {
		s, err := Parse([]byte(text))
		assert.Nil(t, s, text)
		require.EqualError(t, err, want)
		assert.NotContains(t, err.Error(), "secret")
	}
	many := &strings.Builder{}
	for i := range maxNames + 1 {
		_, _ = fmt.Fprintf(many, "n%d sk-key-%06d\n", i, i)
	}
	_, err := Parse([]byte(many.String()))
	require.ErrorContains(t, err, "line 257: the file has more than 4096 keys or 256 names")
}

// FuzzParse: a file that is read has only names for labels and logs, and finds no key that it does not have.
func FuzzParse(f *testing.F) {
	f.Add([]byte(example), "sk-ann-0001")
	f.Add([]byte("a "+hashed("sk-secret-1")+" models=x"), "sk-secret-1")
	f.Fuzz(func(t *testing.T, text []byte, key string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		for _, name := range s.Names() {
			if !isName(name) {
				t.Fatalf("name %q", name)
			}
		}
		if k := s.Find(key); k != nil && !strings.Contains(string(text), key) &&
			!strings.Contains(strings.ToLower(string(text)), hashed(key)) {
			t.Fatalf("found %q", key)
		}
	})
}

// BenchmarkFind is what a key costs a request (goal: 1 µs).
func BenchmarkFind(b *testing.B) {
	text := &strings.Builder{}
	for i := range maxKeys {
		_, _ = fmt.Fprintf(text, "n%d sk-%064d\n", i%maxNames, i)
	}
	s, err := Parse([]byte(text.String()))
	require.NoError(b, err)
	h := http.Header{"Authorization": {fmt.Sprintf("Bearer sk-%064d", maxKeys-1)}}
	b.ReportAllocs()
	for b.Loop() {
		if k, _ := s.FindIn(h); k == nil {
			b.Fatal("not found")
		}
	}
}
