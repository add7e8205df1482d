package promtext_test

import (
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/promtext"
)

const room = 1 << 20

// source is the page of one rank of application a.
func source(rank int, lines ...string) *promtext.Source {
	return &promtext.Source{
		App: "a", Ranks: []promtext.Rank{{Number: rank}}, Text: strings.Join(lines, "\n") + "\n",
	}
}

// merge returns the lines of the merged page, and how many lines were skipped.
func merge(t *testing.T, sources ...*promtext.Source) (lines []string, skipped int) {
	t.Helper()
	p := promtext.New(room)
	for _, s := range sources {
		k, err := p.Add(s)
		require.NoError(t, err)
		skipped += k
	}
	page := text(t, p)
	requireValid(t, page)
	return strings.Split(strings.TrimSuffix(page, "\n"), "\n"), skipped
}

// text is the page as a scraper gets it.
func text(t *testing.T, p *promtext.Page) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, p.Print(&b))
	return b.String()
}

// requireValid fails if Prometheus' own parser does not take a page.
func requireValid(t *testing.T, page string) {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	_, err := parser.TextToMetricFamilies(strings.NewReader(page))
	require.NoError(t, err, page)
}

func TestSamplesOfAMetricStandTogether(t *testing.T) {
	got, skipped := merge(t,
		source(0,
			"# HELP vllm:running Requests in the batch.", "# TYPE vllm:running gauge",
			`vllm:running{engine="0",model_name="m"} 3.0`,
			"# HELP vllm:ttft Time to the first token.", "# TYPE vllm:ttft histogram",
			`vllm:ttft_bucket{le="0.1"} 1`, `vllm:ttft_bucket{le="+Inf"} 2`, "vllm:ttft_sum 0.5",
			"vllm:ttft_count 2",
		),
		source(1,
			"# HELP vllm:ttft Another text.", "# TYPE vllm:ttft histogram", `vllm:ttft_bucket{le="+Inf"} 7`,
			"vllm:ttft_sum 1.5", "vllm:ttft_count 7",
			"# TYPE vllm:running gauge", `vllm:running{engine="0",model_name="m"} 4.0`,
		))
	assert.Zero(t, skipped)
	assert.Equal(t, []string{
		"# HELP vllm:running Requests in the batch.",
		"# TYPE vllm:running gauge",
		`vllm:running{app="a",group="0",rank="0",engine="0",model_name="m"} 3.0`,
		`vllm:running{app="a",group="0",rank="1",engine="0",model_name="m"} 4.0`,
		"# HELP vllm:ttft Time to the first token.",
		"# TYPE vllm:ttft histogram",
		`vllm:ttft_bucket{app="a",group="0",rank="0",le="0.1"} 1`,
		`vllm:ttft_bucket{app="a",group="0",rank="0",le="+Inf"} 2`,
		`vllm:ttft_sum{app="a",group="0",rank="0"} 0.5`,
		`vllm:ttft_count{app="a",group="0",rank="0"} 2`,
		`vllm:ttft_bucket{app="a",group="0",rank="1",le="+Inf"} 7`,
		`vllm:ttft_sum{app="a",group="0",rank="1"} 1.5`,
		`vllm:ttft_count{app="a",group="0",rank="1"} 7`,
	}, got)
}

// TestLines: what becomes of a page, sample by sample.
func TestLines(t *testing.T) {
	const origin = `{app="a",group="0",rank="0"`
	for name, c := range map[string]struct {
		page    []string
		want    []string // without the TYPE lines of untyped metrics
		skipped int
	}{
		"no type": {page: []string{"x 1"}, want: []string{"x" + origin + "} 1"}},
		"labels of the same names": {
			page: []string{`x{app="b",exported_app="c",pool="p",group="g",rank="r"} 1`},
			want: []string{"x" + origin + `,exported_exported_app="b",exported_app="c",exported_pool="p",` +
				`exported_group="g",exported_rank="r"} 1`},
		},
		"escapes stay": {
			page: []string{`x{a="q\"\\\n}",b="{,"} 1`},
			want: []string{"x" + origin + `,a="q\"\\\n}",b="{,"} 1`},
		},
		"spaces and a last comma": {
			page: []string{"  x { a = \"1\" , b=\"2\", }\t 1  "},
			want: []string{"x" + origin + `,a="1",b="2"} 1`},
		},
		"no labels in braces": {page: []string{"x{} 1"}, want: []string{"x" + origin + "} 1"}},
		"a timestamp goes":    {page: []string{"x 1 1712345678000"}, want: []string{"x" + origin + "} 1"}},
		"an exemplar goes":    {page: []string{`x 1 # {trace="t"} 1`}, want: []string{"x" + origin + "} 1"}},
		"values": {
			page: []string{"x NaN", "x +Inf", "x 1e-3"},
			want: []string{"x" + origin + "} NaN", "x" + origin + "} +Inf", "x" + origin + "} 1e-3"},
		},
		"what is no sample": {
			page:    []string{"x", "x y", "x 0x1p-2", "x 1 2 3", "9x 1", "x{a=1} 1", `x{a="1} 1`},
			skipped: 7,
		},
		"labels that are wrong": {
			page: []string{
				`x{a="1",a="2"} 1`, `x{__name__="y"} 1`, `x{a:b="1"} 1`, `x{a="\t"} 1`, "x{a=\"\xff\"} 1",
				`x{a="1"b="2"} 1`,
			},
			skipped: 6,
		},
		"comments and blank lines": {
			page: []string{
				"", "# EOF", "#", "# TYPE", "# TYPE 9 gauge", "# UNIT x seconds", "# HELP y no samples",
			},
		},
		"help is escaped": {
			page: []string{`# HELP x a\b \\ "c" \n d`, "x 1"},
			want: []string{`# HELP x a\\b \\ "c" \n d`, "x" + origin + "} 1"},
		},
		"a type that the format does not have": {
			page: []string{"# TYPE x info", "x 1"}, want: []string{"x" + origin + "} 1"},
		},
		"a summary": {
			page: []string{"# TYPE x summary", `x{quantile="0.5"} 1`, "x_sum 2", "x_count 3", "x 4"},
			want: []string{
				"# TYPE x summary", "x" + origin + `,quantile="0.5"} 1`, "x_sum" + origin + "} 2",
				"x_count" + origin + "} 3",
			},
			skipped: 1,
		},
		"a histogram without bounds": {
			page: []string{"# TYPE x histogram", "x_bucket 1", `x_bucket{le="y"} 1`, "x 1", "x_count 1"},
			want: []string{"# TYPE x histogram", "x_count" + origin + "} 1"}, skipped: 3,
		},
		"twins of a counter": {
			page: []string{"# TYPE x_total counter", "x_total 1", "# TYPE x_created gauge", "x_created 2"},
			want: []string{
				"# TYPE x_created gauge", "x_created" + origin + "} 2", "# TYPE x_total counter",
				"x_total" + origin + "} 1",
			},
		},
		"a histogram that would take another metric's samples": {
			page: []string{"x_count 1", "# TYPE x histogram", `x_bucket{le="1"} 2`, "x_count 3"},
			want: []string{
				"x_bucket" + origin + `,le="1"} 2`, "x_count" + origin + "} 1", "x_count" + origin + "} 3",
			},
		},
		"a type for the samples of a histogram": {
			page: []string{"# TYPE x histogram", "# TYPE x_count counter", "x_count 1"},
			want: []string{"# TYPE x histogram", "x_count" + origin + "} 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			all, skipped := merge(t, source(0, c.page...))
			var got []string
			for _, line := range all {
				isUntyped := strings.HasPrefix(line, "# TYPE") && strings.HasSuffix(line, "untyped")
				if line != "" && !isUntyped {
					got = append(got, line)
				}
			}
			assert.Equal(t, c.want, got)
			assert.Equal(t, c.skipped, skipped)
		})
	}
}

// TestTypesThatContradict: the first page decides, and samples that do not fit its type are skipped.
func TestTypesThatContradict(t *testing.T) {
	got, skipped := merge(t,
		source(0, "# TYPE x gauge", "x 1", "# TYPE y histogram", "y_sum 1"),
		source(1, "# TYPE x histogram", `x_bucket{le="1"} 1`, "x_sum 1", "# TYPE y counter", "y 1"))
	assert.Equal(t, 1, skipped)
	assert.Equal(t, []string{
		"# TYPE x gauge", `x{app="a",group="0",rank="0"} 1`,
		"# TYPE x_bucket untyped", `x_bucket{app="a",group="0",rank="1",le="1"} 1`,
		"# TYPE x_sum untyped", `x_sum{app="a",group="0",rank="1"} 1`,
		"# TYPE y histogram", `y_sum{app="a",group="0",rank="0"} 1`,
	}, got)
}

// TestEngineOfSeveralRanks: its samples get the rank that they name, and no rank if they are the engine's.
func TestEngineOfSeveralRanks(t *testing.T) {
	got, _ := merge(t, &promtext.Source{
		App: "a", Pool: "decode", Group: 2,
		Ranks: []promtext.Rank{{Number: 4, Series: "0"}, {Number: 5, Series: "1"}},
		Text:  "x{engine=\"1\"} 1\nx{dp_rank=\"0\"} 2\nx{engine=\"7\"} 3\nx 4",
	})
	assert.Equal(t, []string{
		"# TYPE x untyped",
		`x{app="a",pool="decode",group="2",rank="5",engine="1"} 1`,
		`x{app="a",pool="decode",group="2",rank="4",dp_rank="0"} 2`,
		`x{app="a",pool="decode",group="2",engine="7"} 3`,
		`x{app="a",pool="decode",group="2"} 4`,
	}, got)
}

func TestGaugesOfDpserve(t *testing.T) {
	p := promtext.New(room)
	p.Declare("up", "A \\ text.")
	skipped, err := p.Add(source(0, "# TYPE up counter", "# HELP up mine", "up 7"))
	require.NoError(t, err)
	assert.Equal(t, 1, skipped, "an engine does not write dpserve's gauges")
	p.Set("up", `a"b`, "", 0, 3, 1)
	assert.Equal(t, "# HELP up A \\\\ text.\n# TYPE up gauge\nup{app=\"a\\\"b\",group=\"0\",rank=\"3\"} 1\n",
		text(t, p))
	requireValid(t, text(t, p))
}

func TestAPageThatDoesNotFitIsLeftOut(t *testing.T) {
	p := promtext.New(100)
	_, err := p.Add(source(0, "x 1", "x 2"))
	require.NoError(t, err)
	_, err = p.Add(source(1, "x 1", "x 2"))
	require.ErrorIs(t, err, promtext.ErrFull)
	assert.NotContains(t, text(t, p), `rank="1"`)
	help := promtext.New(room)
	_, err = help.Add(source(0, "# HELP x "+strings.Repeat("ä", 5000), "x 1"))
	require.NoError(t, err)
	assert.Less(t, len(text(t, help)), 1200)
}

// FuzzAdd: whatever two engines write, the merged page is valid, and its samples are those of the pages.
func FuzzAdd(f *testing.F) {
	f.Add("# TYPE x histogram\nx_bucket{le=\"1\"} 1\nx_sum 1\n",
		"# TYPE x_sum gauge\nx_sum{rank=\"1\"} NaN\n")
	f.Add("# HELP x \\q\nx{a=\"\\\"\"} 1 2 # {} 3\n",
		"x{exported_app=\"1\",app=\"2\"} 0x1\r\n# TYPE x summary\n")
	f.Add("# TYPE x_count histogram\nx_count_sum 1\n", "# TYPE x summary\nx{quantile=\"0\"} 1\nx_count 2\n")
	f.Fuzz(func(t *testing.T, first, second string) {
		p := promtext.New(room)
		p.Declare("up", "")
		added := 0
		for i, page := range []string{first, second} {
			s := source(i, page)
			skipped, err := p.Add(s)
			if err != nil {
				return
			}
			for line := range strings.Lines(s.Text) {
				line = strings.Trim(line, " \t\r\n")
				if line != "" && line[0] != '#' {
					added++
				}
			}
			added -= skipped
		}
		merged := text(t, p)
		requireValid(t, merged)
		samples, seen := 0, map[string]bool{}
		for line := range strings.Lines(merged) {
			if !strings.HasPrefix(line, "#") {
				samples++
				continue
			}
			head := strings.Join(strings.Fields(line)[:3], " ")
			require.False(t, seen[head], "%s twice:\n%s", head, merged)
			seen[head] = true
		}
		require.Equal(t, added, samples)
	})
}
