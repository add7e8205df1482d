package api

import (
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// adminPart returns the part of docs/api.md that describes this API.
func adminPart(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/api.md")
	require.NoError(t, err)
	_, part, found := strings.Cut(string(text), "\n## Admin port\n")
	require.True(t, found, "docs/api.md has no part about the admin port")
	return part
}

// anyNodes has another name than its method Nodes, so that a struct can embed it.
type anyNodes interface{ Nodes }

// TestThePageHasEveryRoute: the table of docs/api.md names the routes of this API, and no other.
func TestThePageHasEveryRoute(t *testing.T) {
	s := NewServer(Config{
		Engines: &calls{},
		Routers: struct{ Routers }{}, Ranks: struct{ Ranks }{}, Nodes: struct{ anyNodes }{},
		Restarts: struct{ Restarts }{}, Metrics: http.NotFoundHandler(),
		EngineMetrics: http.NotFoundHandler(), Ray: &Ray{},
	})
	var served []string
	names := strings.NewReplacer(
		":app", "APP", ":node", "NODE", ":deployment", "DEPLOYMENT", "*id", "ID", ":token", "ID",
		":revision", "REVISION", ":file", "FILE",
	)
	for _, r := range s.newEngine().Routes() {
		served = append(served, r.Method+" "+names.Replace(r.Path))
	}
	var listed []string
	for _, row := range regexp.MustCompile("(?m)^\\| `((?:GET|POST|PUT|DELETE) [^`]+)` \\|").
		FindAllStringSubmatch(adminPart(t), -1) {
		listed = append(listed, row[1])
	}
	slices.Sort(served)
	slices.Sort(listed)
	assert.Equal(t, served, listed, "the routes of the code, and those of docs/api.md")
}

// TestThePageHasEveryError: the table of docs/api.md has every code with its status and exit code, and no
// other.
func TestThePageHasEveryError(t *testing.T) {
	source, err := os.ReadFile("../problem/problem.go")
	require.NoError(t, err)
	var known []string
	constant := regexp.MustCompile(`(?m)^\t\w+ +Code = "(\w+)"`)
	for _, found := range constant.FindAllStringSubmatch(string(source), -1) {
		c := problem.Code(found[1])
		row := fmt.Sprintf("| `%s` | %d | %d |", c, problem.HTTPStatus(c), problem.ExitCode(c))
		known = append(known, row)
	}
	require.Greater(t, len(known), 10)
	listed := regexp.MustCompile("(?m)^\\| `\\w+` \\| \\d+ \\| \\d+ \\|").FindAllString(adminPart(t), -1)
	assert.ElementsMatch(t, known, listed, "the errors of the code, and those of docs/api.md")
}

// TestThePageHasEveryLimit: docs/api.md has the limits of the code.
func TestThePageHasEveryLimit(t *testing.T) {
	page := adminPart(t)
	for _, row := range []string{
		fmt.Sprintf("| file | %d MiB |", maxBody>>20),
		fmt.Sprintf("| body of a route of the Router | %d MiB, %d token ids |", maxRouterBody>>20,
			maxTokenIDs),
		fmt.Sprintf("| connections | %d |", maxConnections),
		fmt.Sprintf("| logs and events that are followed at a time | %d |", maxStreams),
		fmt.Sprintf("| open pages | %d |", maxPages),
		fmt.Sprintf("| `generate` and `dump_events` at a time | %d |", maxGenerates),
		fmt.Sprintf("| request header | %d KiB, %.0f s |", maxHeader>>10, headerTimeout.Seconds()),
		fmt.Sprintf("| body | %.0f s |", bodyTimeout.Seconds()),
		fmt.Sprintf("| answer that is no stream | %.0f s |", callTimeout.Seconds()),
		fmt.Sprintf("| `tail` of logs | %d lines per rank |", maxTail),
	} {
		assert.Contains(t, page, row)
	}
	assert.Contains(t, page, "`"+strings.ToLower(fileHeader)+"`")
}
