package simulate_test

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/routing"
)

// smallStudy compares two policies at two loads.
func smallStudy() *simulate.Study {
	var settings []simulate.Setting
	for _, name := range []string{"mex", "round-robin"} {
		settings = append(settings, simulate.Setting{
			Name: name, Config: simulate.GroupConfig{Config: simulate.Default()},
			NewPolicy: func() (routing.Policy, error) { return routing.New(name, "", nil) },
		})
	}
	chats := func(load float64, seed uint64) []simulate.Request { return simulate.Chats(150, load, seed) }
	return simulate.NewStudy(settings, []float64{4, 8}, 3, chats)
}

func noProgress(float64) error { return nil }

// The order in which the runs of a study are played changes nothing.
func TestRunsOfAStudyNeedNothingOfEachOther(t *testing.T) {
	forth, back := smallStudy(), smallStudy()
	for run := range forth.Runs() {
		require.NoError(t, forth.Play(run, noProgress))
		require.NoError(t, back.Play(back.Runs()-1-run, noProgress))
	}
	report := forth.Report()
	assert.Equal(t, report, back.Report())
	require.Len(t, report.Loads, 2)
	for _, load := range report.Loads {
		require.Len(t, load.Settings, 2)
		assert.Equal(t, 150, load.Requests)
		assert.Equal(t, "mex", load.Settings[0].Name)
		assert.Positive(t, load.Settings[0].Figures["goodput_percent"].Half)
		assert.LessOrEqual(t, load.Settings[0].Figures["goodput_percent"].Mean,
			load.Alone.Figures["goodput_percent"].Mean)
		assert.Positive(t, load.Pooled.Figures["ttft_p50_s"].Mean)
	}
	assert.Equal(t, "one pooled rank, load 8, seed 13", forth.Name(forth.Runs()-1))

	var page, plot strings.Builder
	report.App = "<demo>"
	require.NoError(t, report.WritePage(&page))
	require.NoError(t, report.WritePlot(&plot))
	assert.NotContains(t, page.String(), "<demo>")
	assert.Equal(t, 9, strings.Count(page.String(), "<svg "))
	assert.Equal(t, 2, strings.Count(page.String(), "<table>"))
	for _, outside := range []string{"<script", "src=", "href=", "url("} {
		assert.NotContains(t, page.String(), outside, "the page needs nothing else")
	}
	assert.Equal(t, 4, strings.Count(plot.String(), "stroke-width"), "two policies, two bounds")
	require.NoError(t, xml.Unmarshal([]byte(plot.String()), new(struct{})))
}

func TestInterval(t *testing.T) {
	i := simulate.NewInterval([]float64{1, 2, 3})
	assert.InDelta(t, 2, i.Mean, 1e-9)
	assert.InDelta(t, 4.303/1.7320508, i.Half, 1e-3)
	assert.Equal(t, "2.0 ± 2.5", i.Text("%.1f"))
	assert.Equal(t, "7.0", simulate.NewInterval([]float64{7}).Text("%.1f"), "one value")
	assert.Equal(t, "7.0", simulate.Interval{Mean: 7, Half: .01}.Text("%.1f"), "less than a digit")
	many := make([]float64, 102)
	many[0] = 102
	assert.InDelta(t, 1.9837, simulate.NewInterval(many).Half, 1e-3, "100 degrees of freedom")
}
