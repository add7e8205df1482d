package examples_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// alertRules are the rules of examples/prometheus/alerts.yml.
type alertRules struct {
	Groups []struct {
		Rules []struct {
			Alert string `yaml:"alert"`
			Expr  string `yaml:"expr"`
		} `yaml:"rules"`
	} `yaml:"groups"`
}

func readRules(t *testing.T) (rules alertRules) {
	t.Helper()
	text, err := os.ReadFile("prometheus/alerts.yml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, &rules))
	require.Len(t, rules.Groups, 1)
	require.Greater(t, len(rules.Groups[0].Rules), 12)
	return rules
}

// queries are the expressions of the dashboard and of the alert rules.
func queries(t *testing.T) (out []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	text, err := os.ReadFile("prometheus/dashboard.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &dashboard))
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			out = append(out, target.Expr)
		}
	}
	require.Greater(t, len(out), 30)
	for _, r := range readRules(t).Groups[0].Rules {
		out = append(out, r.Expr)
	}
	return out
}

// LG66: each metric and each label that the dashboard and the alert rules ask for is in a scrape of a node,
// or in that of an engine.
func TestQueriesNameWhatNodesExport(t *testing.T) {
	known := scrapedSeries(t)
	for _, query := range queries(t) {
		metrics, labels := namesOf(query)
		require.NotEmpty(t, metrics, query)
		var has []string
		for _, m := range metrics {
			require.Contains(t, known, m, query)
			has = append(has, known[m]...)
		}
		for _, label := range labels {
			assert.Contains(t, has, label, query)
		}
		assert.Equal(t, strings.Count(query, "("), strings.Count(query, ")"), query)
	}
}

// scrapedSeries are the names of metrics that Prometheus has, with their labels.
func scrapedSeries(t *testing.T) map[string][]string {
	t.Helper()
	process := []string{"instance", "job"}
	engines := append([]string{"app", "pool", "group", "rank"}, process...)
	out := map[string][]string{
		"process_cpu_seconds_total": process, "process_resident_memory_bytes": process,
		"dpserve_engine_metrics_up": engines, "sglang:token_usage": engines,
	}
	for path, added := range map[string][]string{
		"../internal/telemetry/testdata/metrics.txt":                                    process,
		"../internal/engine/sim/testdata/v0.32.0/metrics/dense_one_rank_after_load.txt": engines,
	} {
		page, err := os.ReadFile(path)
		require.NoError(t, err)
		for line := range strings.Lines(string(page)) {
			name, labels, _ := strings.Cut(strings.TrimSpace(line), "{")
			if strings.HasPrefix(line, "#") {
				continue
			}
			name, _, _ = strings.Cut(name, " ")
			for _, label := range labelName.FindAllStringSubmatch(labels, -1) {
				out[name] = append(out[name], label[1])
			}
			out[name] = append(out[name], added...)
		}
	}
	return out
}

var (
	labelName  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"`)
	matchers   = regexp.MustCompile(`\{[^}]*\}`)
	labelLists = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
	ranges     = regexp.MustCompile(`\[[^\]]*\]`)
	identifier = regexp.MustCompile(`[a-zA-Z_:][a-zA-Z0-9_:]*\s*\(?`)
)

// namesOf are the metrics and labels of a PromQL expression. What is left without labels and ranges is
// metrics, functions, which have a parenthesis behind them, and words.
func namesOf(query string) (metrics, labels []string) {
	for _, m := range labelName.FindAllStringSubmatch(query, -1) {
		labels = append(labels, m[1])
	}
	for _, m := range labelLists.FindAllStringSubmatch(query, -1) {
		for label := range strings.SplitSeq(m[1], ",") {
			labels = append(labels, strings.TrimSpace(label))
		}
	}
	rest := query
	for _, cut := range []*regexp.Regexp{matchers, ranges, labelLists} {
		rest = cut.ReplaceAllString(rest, " ")
	}
	words := []string{"sum", "max", "min", "count", "and", "or", "unless"}
	for _, word := range identifier.FindAllString(rest, -1) {
		isFunction := strings.HasSuffix(word, "(")
		word = strings.TrimSpace(word)
		if !isFunction && !slices.Contains(words, word) {
			metrics = append(metrics, word)
		}
	}
	return metrics, labels
}

// LG67: docs/operations.md has a row on what to do for each alert, and for no other.
func TestEveryAlertHasARunbook(t *testing.T) {
	page, err := os.ReadFile("../docs/operations.md")
	require.NoError(t, err)
	var documented, alerts []string
	row := regexp.MustCompile("(?m)^\\| `(Dpserve\\w+)` \\|")
	for _, row := range row.FindAllStringSubmatch(string(page), -1) {
		documented = append(documented, row[1])
	}
	for _, r := range readRules(t).Groups[0].Rules {
		alerts = append(alerts, r.Alert)
	}
	assert.Equal(t, alerts, documented)
}
