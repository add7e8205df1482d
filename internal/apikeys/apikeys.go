// Package apikeys reads a file of API keys and finds the key that a client presents. It does no IO.
//
// A line is `NAME KEY [models=a,b]`, where KEY is the key itself or sha256: and the hex digest of it. Empty
// lines and lines that begin with # are ignored. Several lines may have one name, so that a client can change
// its key while both are valid.
package apikeys

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"net/http"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of a file. A presented key longer than MaxKey is wrong without being hashed.
const (
	MaxFile  = 1 << 20 // bytes
	maxKeys  = 4096
	maxNames = 256 // each is a label of metrics
	maxName  = 64
	MinKey   = 8
	MaxKey   = 512
)

// digestPrefix begins a KEY that is the SHA-256 of a key.
const digestPrefix = "sha256:"

// lineHint shows how a line is written.
const lineHint = "a line is NAME KEY [models=a,b]; KEY is the key, or sha256: and its hex digest " +
	"(printf %%s KEY | sha256sum)"

// digest is the SHA-256 of a key.
type digest [sha256.Size]byte

// Key is one line of a file.
type Key struct {
	Name   string
	digest digest
	models []string // served names that the key may use; nil: all
}

// Allows reports whether the key may use a model, by its served name. A nil key is that of a node without
// keys, and may use every model.
func (k *Key) Allows(model string) bool {
	return k == nil || k.models == nil || slices.Contains(k.models, model)
}

// AllowsAll reports whether the key may use every model.
func (k *Key) AllowsAll() bool { return k == nil || k.models == nil }

// Set is the keys of one file. Immutable.
type Set struct {
	byDigest map[digest]*Key
	names    []string
}

// Names returns the names of the keys, each once.
func (s *Set) Names() []string { return s.names }

// Find returns the key that a client presents, nil if there is none.
//
// Keys are compared in constant time: the map is asked for the SHA-256 of the presented key, whose bits the
// client cannot choose, so the time of the look-up says nothing about the keys of the file. The comparison
// after it is constant too.
func (s *Set) Find(presented string) *Key {
	if presented == "" || len(presented) > MaxKey {
		return nil
	}
	d := digest(sha256.Sum256([]byte(presented)))
	k := s.byDigest[d]
	if k == nil || subtle.ConstantTimeCompare(k.digest[:], d[:]) != 1 {
		return nil
	}
	return k
}

// The header fields in which clients present keys: OpenAI's, Anthropic's and Azure's. The names are in
// canonical form.
const (
	headerBearer    = "Authorization"
	headerAnthropic = "X-Api-Key"
	headerAzure     = "Api-Key"
)

// FindIn returns the key that a request presents; nil: none, or a wrong one. presented reports whether the
// request has a field for keys. A client may send several fields, of which one right key is enough.
func (s *Set) FindIn(h http.Header) (k *Key, presented bool) {
	for _, v := range h[headerBearer] {
		presented = true
		if scheme, key, ok := strings.Cut(v, " "); ok && strings.EqualFold(scheme, "Bearer") {
			if k := s.Find(strings.TrimSpace(key)); k != nil {
				return k, true
			}
		}
	}
	for _, name := range [...]string{headerAnthropic, headerAzure} {
		for _, v := range h[name] {
			presented = true
			if k := s.Find(v); k != nil {
				return k, true
			}
		}
	}
	return nil, presented
}

// Remove deletes the fields for keys from a header that goes on to an engine.
func Remove(h http.Header) {
	delete(h, headerBearer)
	delete(h, headerAnthropic)
	delete(h, headerAzure)
}

// Parse reads a file. An error names the line and never a key.
func Parse(text []byte) (*Set, error) {
	if len(text) > MaxFile {
		return nil, problem.New(problem.InvalidArgument, "the file has more than %d bytes", MaxFile).
			WithHint(lineHint)
	}
	s := &Set{byDigest: map[digest]*Key{}}
	lines := map[digest]int{}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		k, err := parseLine(line)
		if err != nil {
			return nil, problem.New(problem.InvalidArgument, "line %d: %w", number, err).WithHint(lineHint)
		}
		if before := lines[k.digest]; before != 0 {
			return nil, problem.New(problem.InvalidArgument, "lines %d and %d have the same key", before,
				number).WithHint("delete one of them")
		}
		lines[k.digest], s.byDigest[k.digest] = number, k
		if !slices.Contains(s.names, k.Name) {
			s.names = append(s.names, k.Name)
		}
		if len(lines) > maxKeys || len(s.names) > maxNames {
			return nil, problem.New(problem.InvalidArgument, "line %d: the file has more than %d keys or %d "+
				"names", number, maxKeys, maxNames).WithHint("several keys may have one name")
		}
	}
	if len(lines) == 0 {
		return nil, problem.New(problem.InvalidArgument, "the file has no key").WithHint(lineHint)
	}
	return s, nil
}

func parseLine(line string) (*Key, error) {
	words := strings.Fields(line)
	if len(words) < 2 || len(words) > 3 {
		return nil, problem.New(problem.InvalidArgument, "it has %d words, want 2 or 3", len(words))
	}
	k := &Key{Name: words[0]}
	if !isName(k.Name) {
		return nil, problem.New(problem.InvalidArgument,
			"the name must have 1 to %d letters, digits, dots, dashes and underscores", maxName)
	}
	if hexed, ok := strings.CutPrefix(words[1], digestPrefix); ok {
		b, err := hex.DecodeString(hexed)
		if err != nil || len(b) != sha256.Size {
			return nil, problem.New(problem.InvalidArgument, "after %s come %d hex digits", digestPrefix,
				2*sha256.Size)
		}
		k.digest = digest(b)
	} else {
		if len(words[1]) < MinKey || len(words[1]) > MaxKey || !isPrintable(words[1]) {
			return nil, problem.New(problem.InvalidArgument, "a key has %d to %d printable ASCII characters",
				MinKey, MaxKey)
		}
		k.digest = sha256.Sum256([]byte(words[1]))
	}
	if len(words) < 3 {
		return k, nil
	}
	list, ok := strings.CutPrefix(words[2], "models=")
	if k.models = strings.Split(list, ","); !ok || slices.Contains(k.models, "") {
		return nil, problem.New(problem.InvalidArgument, "after the key comes models=a,b or nothing")
	}
	return k, nil
}

// isName reports whether a text may stand in logs and labels as it is.
func isName(s string) bool {
	for i := range len(s) {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '-', c == '_':
		default:
			return false
		}
	}
	return s != "" && len(s) <= maxName
}

func isPrintable(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
