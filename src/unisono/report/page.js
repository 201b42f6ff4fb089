// Readouts under the pointer; the page says all it has to say without this script, too.
(function(){
const tip=document.getElementById('tip');
function words(node){
  const owner=node.closest&&node.closest('[data-tip],.bars g');
  if(!owner)return null;
  const title=owner.querySelector(':scope > title');
  if(title){owner.dataset.tip=title.textContent;title.remove();}
  return owner.dataset.tip;
}
function show(event){
  const said=words(event.target);
  if(!said){tip.style.display='none';return;}
  tip.textContent=said;tip.style.display='block';
  const box=tip.getBoundingClientRect();
  tip.style.left=Math.max(4,Math.min(event.clientX+12,innerWidth-box.width-6))+'px';
  tip.style.top=(event.clientY+18+box.height>innerHeight?event.clientY-box.height-10:event.clientY+16)+'px';
}
document.addEventListener('pointermove',show);
document.addEventListener('pointerdown',show);
addEventListener('scroll',()=>{tip.style.display='none';},{passive:true});
for(const plot of document.querySelectorAll('.plot')){
  const data=JSON.parse(plot.dataset.chart),axis=data.axis,out=plot.parentNode.querySelector('output');
  const cursor=plot.querySelector('.cursor');
  const read=event=>{
    const box=plot.getBoundingClientRect(),[first,last]=data.x;
    const at=first+(last-first)*Math.max(0,Math.min(1,(event.clientX-box.left)/box.width));
    let step=null;const said=[];
    for(const line of data.lines){
      let best=line.points[0];
      for(const point of line.points)if(Math.abs(point[0]-at)<Math.abs(best[0]-at))best=point;
      if(step===null)step=best[0];
      said.push(line.name+' '+best[1]);
    }
    cursor.style.left=100*(step-first)/(last-first)+'%';cursor.style.display='block';
    const x=axis.log?10**step:step;
    out.textContent=axis.name+' '+(axis.whole?Math.round(x):+x.toPrecision(4))+': '+said.join(', ');
  };
  plot.addEventListener('pointermove',read);plot.addEventListener('pointerdown',read);
  plot.addEventListener('pointerleave',()=>{cursor.style.display='none';out.textContent='';});
}
})();
