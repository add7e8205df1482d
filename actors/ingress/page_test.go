package ingress

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// endpointPart returns the part of docs/api.md that describes what an ingress serves.
func endpointPart(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/api.md")
	require.NoError(t, err)
	part, _, found := strings.Cut(string(text), "\n## Admin port\n")
	require.True(t, found)
	return part
}

// sourceOf returns the text of a file of the repository.
func sourceOf(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// TestThePageHasEveryRoute: the table of docs/api.md names the routes of an ingress, and no other; the
// paragraph below it names what an ingress refuses.
func TestThePageHasEveryRoute(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	page := endpointPart(t)
	var served []string
	for r := openai.Completions; int(r) < openai.NumRoutes; r++ {
		for _, path := range r.Paths() {
			served = append(served, r.Method()+" "+path)
		}
	}
	for _, r := range (surface{g.in}).newEngine().Routes() {
		if r.Method != http.MethodHead && openai.RouteOf(r.Path) == openai.NoRoute { // HEAD is said in words
			served = append(served, r.Method+" "+strings.Replace(r.Path, "*id", "{id}", 1))
		}
	}
	var listed []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(?:GET|POST) .*$").FindAllString(page, -1) {
		routes, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
		for _, r := range strings.Split(routes, ", ") {
			listed = append(listed, strings.Trim(r, "`"))
		}
	}
	slices.Sort(served)
	slices.Sort(listed)
	assert.Equal(t, served, listed, "the routes of the code, and those of docs/api.md")

	_, refused, _ := strings.Cut(page, "**Not for clients**")
	refused, _, _ = strings.Cut(refused, "\n\n")
	paths := regexp.MustCompile("`(/[^`]+)`").FindAllStringSubmatch(refused, -1)
	require.Greater(t, len(paths), 10)
	for _, path := range paths {
		a := g.post(path[1], chatBody)
		assert.Equal(t, http.StatusForbidden, a.status, path[1])
		assert.Equal(t, "route_denied", a.code(t), path[1])
	}
}

// TestThePageHasEveryHeader: docs/api.md names every header that an ingress reads or sets.
func TestThePageHasEveryHeader(t *testing.T) {
	page := endpointPart(t)
	names := regexp.MustCompile(`(?m)^\theader\w+ += "([^"]+)"`).
		FindAllStringSubmatch(sourceOf(t, "header.go"), -1)
	require.Greater(t, len(names), 10)
	known := []string{}
	for _, name := range names {
		known = append(known, strings.ToLower(name[1]))
		assert.Contains(t, page, "`"+strings.ToLower(name[1])+"`")
	}
	own := regexp.MustCompile("`(x-(?:dpserve|session|request)-[a-z-]+)`")
	for _, name := range own.FindAllStringSubmatch(page, -1) {
		assert.Contains(t, known, name[1], "docs/api.md names a header that the code does not know")
	}
}

// TestThePageHasEveryError: the table of docs/api.md has every code with its status and type, and no other.
func TestThePageHasEveryError(t *testing.T) {
	codes := regexp.MustCompile(`(?m)^\tCode\w+ += "(\w+)"`).
		FindAllStringSubmatch(sourceOf(t, "../../internal/engine/openai/error.go"), -1)
	require.Greater(t, len(codes), 10)
	var known []string
	for _, code := range codes {
		status := openai.Status(code[1])
		var body struct{ Error struct{ Type string } }
		require.NoError(t, json.Unmarshal(openai.ErrorBody(nil, status, "", code[1], "x", ""), &body))
		known = append(known, fmt.Sprintf("| `%s` | %d | `%s` |", code[1], status, body.Error.Type))
	}
	listed := regexp.MustCompile("(?m)^\\| `\\w+` \\| \\d+ \\| `\\w+` \\|").FindAllString(endpointPart(t), -1)
	assert.ElementsMatch(t, known, listed, "the errors of the code, and those of docs/api.md")
}

// TestThePageHasEveryLimit: docs/api.md has the limits of the code.
func TestThePageHasEveryLimit(t *testing.T) {
	page, l, timers := endpointPart(t), Limits{}.withDefaults(), Timers{}.withDefaults()
	for _, row := range []string{
		fmt.Sprintf("| body | %d MiB; `--max-body` takes up to %d MiB |", l.MaxBody>>20, LargestMaxBody>>20),
		fmt.Sprintf("| memory of all bodies on this node | %d MiB, up to %d GiB with a larger",
			l.bodyBudget(0)>>20, Limits{MaxBody: LargestMaxBody}.bodyBudget(0)>>30),
		fmt.Sprintf("is slower than %d KiB/s | %.0f s |", bodyRate>>10, timers.BodyStall.Seconds()),
		fmt.Sprintf("| body as a whole, up to %d MiB | %.0f minutes |", wholeBody>>20,
			timers.wholeBody().Minutes()),
		fmt.Sprintf("| request line and header | %d KiB, %d fields, %.0f s |", l.MaxHeaderBytes>>10,
			l.MaxHeaderFields, timers.ReadHeader.Seconds()),
		fmt.Sprintf("| connections | %d |", l.MaxConns),
		fmt.Sprintf("| idle connection | %.0f s |", timers.Idle.Seconds()),
		fmt.Sprintf("| HTTP/2 streams of a connection | %d |", maxStreams),
		fmt.Sprintf("and `max_queued_tokens`: without it %d, less under", queueTokens(l.bodyBudget(0))),
		fmt.Sprintf("| ranks that may refuse one request for other reasons than being full | %d |",
			maxRefusals),
		fmt.Sprintf("at one engine | %d; %d wait for one application", uncountedPerRank, maxUncounted),
		fmt.Sprintf("| client that does not read | %.0f s per write |", timers.SlowReader.Seconds()),
		fmt.Sprintf("1 to %d visible characters", maxRequestID),
		fmt.Sprintf("%d bytes count", maxSession),
	} {
		assert.Contains(t, page, row)
	}
	of := func(file, name, want string) {
		source := sourceOf(t, "../../internal/engine/openai/"+file)
		assert.Regexp(t, `(?m)^\t`+name+` += `+regexp.QuoteMeta(want)+`$`, source, "a limit of docs/api.md")
	}
	of("body_json.go", "maxDepth", "64")
	of("body_json.go", "maxFields", "1024")
	of("body_json.go", "maxKeys", "1 << 18")
	of("body.go", "maxN", "128")
	of("body.go", "maxSequences", "1024")
	of("body.go", "maxMaxTokens", "1 << 31")
	for _, row := range []string{
		"| depth of the JSON | 64 |", "| top-level fields, keys in all | 1024, 262144 |", "| `n` | 128 |",
		"| `n` × prompts | 1024 |", "| `max_tokens` | 2147483648 |",
	} {
		assert.Contains(t, page, row)
	}
}
